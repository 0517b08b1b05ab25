"""Check that sentences are easy to read: no docstring begins with a question word, and few sentences are long.

    python scripts/sentences.py              print the counts and every offender
    python scripts/sentences.py --limit 1    also exit with 1 if a docstring offends, or more than 1 % of sentences

Docstrings are those of `src`, including the strings below attributes and constants. Sentences are the prose of `docs`,
README, CONTRIBUTING and CHANGELOG. Code, tables, formulas and link targets do not count as prose.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MAX_WORDS = 40
QUESTION_WORD = re.compile(r"(What|Who|Whom|Whose|Whoever)\b")
FENCE = re.compile(r"\s*(```|~~~|\$\$)")
NOT_PROSE = re.compile(r"\s*(\||:::|<!--|\[[^]]+\]: )")
LIST_ITEM = re.compile(r"\s*([-*+]|\d+\.) ")
LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
CODE_FORMULA_OR_ADDRESS = re.compile(r"`[^`]+`|\$[^$]+\$|https?://\S+")
SENTENCE_END = re.compile(r"(?<![.(\s]\w\.)(?<!\bal\.)(?<=[.!?])[)*_\"]*\s+(?=[^a-z\s])")
WORD = re.compile(r"\w+(?:[-'’.,/]\w+)*")


class Sentence(NamedTuple):
    """A sentence or docstring, and the line that it begins in."""

    line: int
    text: str

    @property
    def is_long(self) -> bool:
        return len(WORD.findall(self.text)) > MAX_WORDS


def question_docstrings(python: str) -> list[Sentence]:
    """Return the docstrings of a Python file that begin with a question word."""
    found = []
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value.strip()
            if QUESTION_WORD.match(text):
                found.append(Sentence(node.lineno, text.partition("\n")[0]))
    return sorted(found)


def prose_sentences(markdown: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown file."""
    for line, paragraph in _paragraphs(markdown):
        prose = LINK.sub(r"\1", CODE_FORMULA_OR_ADDRESS.sub("Code", paragraph))
        start = 0
        for end in [*(match.end() for match in SENTENCE_END.finditer(prose)), len(prose)]:
            text = prose[start:end]
            if WORD.search(text):
                yield Sentence(line + prose[:start].count("\n"), " ".join(text.split()))
            start = end


def _paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of every paragraph, heading and list item."""
    fence, lines, first = "", [], 0
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        mark = FENCE.match(line)
        is_code = bool(fence or mark) or (not lines and line.startswith("    ") and not LIST_ITEM.match(line))
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        ends = is_code or not line.strip() or line.startswith("#") or NOT_PROSE.match(line) or LIST_ITEM.match(line)
        if lines and (ends or lines[0].startswith("#")):
            yield first, "\n".join(lines)
            lines = []
        if line.strip() and not is_code and not NOT_PROSE.match(line):
            first = first if lines else number
            lines.append(line)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--limit", type=float, metavar="PERCENT", help="the largest share of long sentences")
    limit = options.parse_args().limit
    questions = {path: question_docstrings(path.read_text("utf-8")) for path in (ROOT / "src").rglob("*.py")}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts]
    pages += [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    sentences = {page: list(prose_sentences(page.read_text("utf-8"))) for page in pages}
    long = {page: [sentence for sentence in found if sentence.is_long] for page, found in sentences.items()}
    for path, found in sorted([*questions.items(), *long.items()]):
        for line, text in found:
            print(f"{path.relative_to(ROOT)}:{line}: {text}")
    num_questions, num_long, total = (sum(map(len, found.values())) for found in (questions, long, sentences))
    share = 100 * num_long / total
    print(f"docstrings that begin with a question word: {num_questions}")
    print(f"sentences of more than {MAX_WORDS} words: {num_long} of {total}, {share:.2f} %")
    if limit is not None and (num_questions or share > limit):
        sys.exit(f"expected no such docstring, and at most {limit:g} % of such sentences; rewrite the lines above")


if __name__ == "__main__":
    main()
