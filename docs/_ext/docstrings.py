"""Show docstrings as they are read in an editor: backticks are code, indented blocks are code, the rest is text.

Docstrings of the package are plain text with backticks and Google-style sections. Sphinx reads reStructuredText. This
extension translates before napoleon reads the sections, and adds the options of a dataclass with their help.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from sphinx.application import Sphinx

import fedslr
from fedslr.core import schema

INDENT = "    "
BEFORE_NAPOLEON, AFTER_NAPOLEON = 400, 600
SECTIONS = re.compile(r"(Args|Returns|Raises|Yields|Example|Examples|Attributes|Note):$")


def inline(line: str) -> str:
    """Return a line of text as reStructuredText: code in backticks stays code, every other character is literal."""
    parts = re.split(r"(``?[^`]+``?)", line)
    return "".join(_code(part) if part.startswith("`") else _text(part) for part in parts)


def _code(part: str) -> str:
    text = part.strip("`")
    name = text.removeprefix("fedslr.")
    if name in fedslr.__all__ and name != "__version__":
        return f":py:obj:`{name} <fedslr.{name}>`"
    return f"``{text}``"


def _text(part: str) -> str:
    part = re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part).replace("|", r"\|")
    # `*word*` is emphasis; every other star is a star.
    return re.sub(r"(?<![*\w])\*(?![\w]+\*(?!\w))|(?<=[^\w])\*(?!\w)", r"\\*", part)


def translate(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    found: list[str] = []
    section, literal = "", False
    for before, line in zip(["", *lines], lines, strict=False):
        if header := SECTIONS.match(line):
            section, literal = header[1], False
        elif line.strip() and not line.startswith(" "):
            section, literal = section if before.strip() else "", False
        elif line.strip() and not literal and _begins_code(section, before):
            found += [INDENT * bool(section) + "::", ""]
            literal = True
        found.append(INDENT * bool(section) + line if literal else line if header else inline(line))
    return found


def _begins_code(section: str, before: str) -> bool:
    """Return whether an indented line after `before` begins a block of code: an example, or a block of no section."""
    return SECTIONS.match(before) is not None if section.startswith("Example") else not (section or before.strip())


def options(cls: type) -> list[str]:
    """Return the options of a dataclass that declares them with their help, as a field list."""
    declared = dataclasses.is_dataclass(cls) and any(
        hasattr(hint, "__metadata__") for hint in schema.hints(cls).values()
    )
    if not declared:
        return []
    described = [option for option in schema.describe(cls) if option.help]
    found = [f":param {o.name}: {inline(_sentence(o))}" for o in described]
    return ["", *found, ""] if found else []


def _sentence(option: schema.Option) -> str:
    kind = "" if option.kind == "a text" else f", {option.kind}"
    return f"{option.help[:1].upper()}{option.help[1:]}{kind}. Default: `{option.default}`."


ATTRIBUTES: dict[str, list[str]] = {}
"""The docstrings of attributes: napoleon would take the words before a colon for a type."""


def on_docstring(app: Sphinx, what: str, name: str, obj: Any, _: Any, lines: list[str]) -> None:
    """Translate a docstring and add the options of a dataclass."""
    lines[:] = translate(lines)
    if what == "attribute":
        ATTRIBUTES[name] = list(lines)
    if inspect.isclass(obj):
        lines.extend(options(obj))


def after_napoleon(app: Sphinx, what: str, name: str, obj: Any, _: Any, lines: list[str]) -> None:
    """Put the docstring of an attribute back."""
    lines[:] = ATTRIBUTES.pop(name, lines)


def on_signature(app: Sphinx, what: str, name: str, obj: Any, _: Any, signature: str | None, result: Any) -> Any:
    """Leave the types of fields out of a dataclass's signature; the options below it have them in words."""
    if what == "class" and dataclasses.is_dataclass(obj):
        fields = [f for f in dataclasses.fields(obj) if f.init]
        shown = [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}" for f in fields]
        return f"({', '.join(shown) if len(shown) < 12 else '**settings'})", None
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", on_docstring, priority=BEFORE_NAPOLEON)
    app.connect("autodoc-process-docstring", after_napoleon, priority=AFTER_NAPOLEON)
    app.connect("autodoc-process-signature", on_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
