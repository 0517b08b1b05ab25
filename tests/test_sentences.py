"""The check of sentences counts known texts as a reader would."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "sentences.py"
SPEC = importlib.util.spec_from_file_location("sentences", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
sentences = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sentences)

PAGE = """# A title

The first sentence ends here. `code.here()` begins the second one,
which has two lines. See [the page](a-very/long/target.md "with a title"), e.g. here!

```python
these words are no prose. They = "are code."
```

| a table. | It has no sentences. |
|---|---|

    indented code. It is none either.

$$
x = y. Z = 1
$$

- A point
- Another point, with Huang et al. (2023). It goes
  on in the next line.
"""


def test_prose_is_found_and_nothing_else():
    found = [(line, text) for line, text in sentences.prose_sentences(PAGE)]
    assert found == [
        (1, "# A title"),
        (3, "The first sentence ends here."),
        (3, "Code begins the second one, which has two lines."),
        (4, "See the page, e.g. here!"),
        (19, "- A point"),
        (20, "- Another point, with Huang et al. (2023)."),
        (20, "It goes on in the next line."),
    ]


def test_a_long_sentence_has_more_than_forty_words():
    short, long = "A short one " + "word " * 37 + ".", "A long one " + "word " * 38 + "."
    assert [sentence.is_long for sentence in sentences.prose_sentences(f"{short}\n\n{long}")] == [False, True]


def test_docstrings_that_begin_with_a_question_word_are_found():
    python = '"""What a module is."""\nx = 1\n"""Whatever x is."""\n\n\ndef f():\n    """\n    Who calls f.\n    """\n'
    assert sentences.question_docstrings(python) == [(1, "What a module is."), (7, "Who calls f.")]
