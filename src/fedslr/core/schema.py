"""Options of recipes, methods and Python calls: every option is declared once, with its type, rule and help.

    eta_g: Annotated[float, positive, "proximal step size of the server"] = 10.0

An option may be one of several dataclasses, as in `Annotated[Optimizer, Choice(OPTIMIZERS), "…"]`. A user gives its
name, such as "adam", or a table with its name and its own options.

`build` makes such a dataclass from a table, such as a recipe's table or keyword arguments. `check` verifies an
instance. `describe` returns the options for the command line's help.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from fedslr.core.errors import FedslrError, suggest

T = TypeVar("T")


class Rule(NamedTuple):
    """A condition on an option's value."""

    words: str
    """The condition in words, which follow "expected" and the type in an error."""
    holds: Callable[[Any], bool]
    """A function that returns whether a value satisfies the condition."""


positive = Rule("above 0", lambda v: v > 0)
non_negative = Rule("0 or above", lambda v: v >= 0)
share = Rule("from 0 to 1", lambda v: 0 <= v <= 1)
seed_range = Rule("from 0 to 2⁶³ − 1", lambda v: 0 <= v < 2**63)
countable = Rule("from 1 to 100,000,000", lambda v: 1 <= v <= 10**8)
countable_from_zero = Rule("from 0 to 100,000,000", lambda v: 0 <= v <= 10**8)
below_one = Rule("from 0 to below 1", lambda v: 0 <= v < 1)
fraction = Rule("above 0 and at most 1", lambda v: 0 < v <= 1)

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def in_bytes(value: int | str) -> int | None:
    """Return the number of bytes in a size such as 8GB, 500 MB or 1000; None for any other text."""
    found = re.fullmatch(r"(\d{1,20}(?:\.\d+)?)\s*([KMGT]?B)?", str(value).strip().upper())
    return None if found is None else int(float(found[1]) * UNITS[found[2] or ""])


memory_size = Rule("such as 500MB or 8GB", lambda v: in_bytes(v) is not None)


def one_of(*names: str) -> Rule:
    """Return the rule that a value is one of some names."""
    return Rule(f"one of {', '.join(names)}", lambda v: v in names)


class Choice(NamedTuple):
    """The dataclasses of which an option's value is one, by name, and the name that a table without one has."""

    kinds: Mapping[str, type]
    usual: str | None = None


class Option(NamedTuple):
    """The description of one option for the command line's help."""

    name: str
    kind: str
    default: Any
    help: str


KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "nothing",
    tuple[str, ...]: "a list of texts",
    tuple[float, ...]: "a list of numbers",
}


def _parts(annotation: Any) -> tuple[tuple[Any, ...], list[Rule], str]:
    """Return the plain types, the rules and the help of an annotation."""
    extras: list[Any] = []
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *extras = typing.get_args(annotation)
    kinds = (annotation,) if typing.get_origin(annotation) is tuple else typing.get_args(annotation) or (annotation,)
    return kinds, [e for e in extras if isinstance(e, Rule)], next((e for e in extras if isinstance(e, str)), "")


def choice_of(annotation: Any) -> Choice | None:
    """Return the choice of an annotation, if its values are dataclasses."""
    return next((e for e in getattr(annotation, "__metadata__", ()) if isinstance(e, Choice)), None)


def _words(kinds: tuple[Any, ...], rules: list[Rule]) -> str:
    nouns = " or ".join(KINDS[k] for k in kinds if k is not type(None))
    if any(r.words.startswith("one of") for r in rules):
        nouns = ""
    return " ".join([nouns, *(r.words for r in rules)]).strip()


def _is_kind(value: Any, kind: Any) -> bool:
    """Return whether a value has a type. Integers, also those of numpy, are numbers; booleans are not."""
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is_kind(one, typing.get_args(kind)[0]) for one in value)
    return isinstance(value, kind)


def show(value: Any) -> str:
    """Return a value as the user wrote it, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def check_value(name: str, value: Any, annotation: Any) -> Any:
    """Return a value as its declared type; refuse a value of another type or against a rule."""
    kinds, rules, _ = _parts(annotation)
    if value is None and type(None) in kinds:
        return None
    if (choice := choice_of(annotation)) is not None:
        return _choose(name, value, choice)
    for kind in kinds:
        if _is_kind(value, kind) and all(r.holds(value) for r in rules):
            if typing.get_origin(kind) is tuple:
                return tuple(check_value(name, one, typing.get_args(kind)[0]) for one in value)
            return kind(value) if kind in (int, float) else value
    raise FedslrError(f"{name}: got {show(value)}, expected {_words(kinds, rules)}")


def _choose(name: str, value: Any, choice: Choice) -> Any:
    """Return the dataclass that a name, or a table with a name, describes."""
    table = {"name": value} if isinstance(value, str) else value
    if isinstance(table, tuple(choice.kinds.values())):
        return table
    chosen = table.get("name", choice.usual) if isinstance(table, Mapping) else None
    if not isinstance(chosen, str) or chosen not in choice.kinds:
        raise FedslrError(f"{name}: got {show(value)}, expected {_choice_words(choice)}")
    return build(choice.kinds[chosen], {k: v for k, v in table.items() if k != "name"}, name, f"{name} '{chosen}'")


def _choice_words(choice: Choice) -> str:
    return f"one of {', '.join(choice.kinds)}, or a table with such a name and its options"


def to_table(value: Any) -> dict[str, Any]:
    """Return one of the dataclasses of a choice as a table."""
    return {"name": value.name, **dataclasses.asdict(value)}


def hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, with their rules and help."""
    return typing.get_type_hints(cls, include_extras=True)


def fields(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def build(cls: type[T], table: Mapping[str, Any], where: str = "", title: str = "") -> T:
    """Return a dataclass made from a table; refuse unknown and missing keys, and wrong values.

    Errors name the table as `where`, and a table with unknown keys as `title` if that is given.
    """
    known = fields(cls)
    for key in table:
        if key not in known:
            place = f" in {title or where}" if where else ""
            options = suggest(key, known) if known else "it takes no options"
            raise FedslrError(f"unknown key '{key}'{place}; {options}")
    annotations = hints(cls)
    prefix = f"{where}." if where else ""
    for name in required(cls):
        if name not in table:
            raise FedslrError(f"{prefix}{name} is missing ({_parts(annotations[name])[2]}); give a value")
    return cls(**{k: check_value(prefix + k, v, annotations[k]) for k, v in table.items()})


def required(cls: type) -> list[str]:
    """Return the names of the options without a default."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]


def check(instance: Any) -> None:
    """Verify every field of a dataclass instance, and convert integers in fields of type float to floats."""
    annotations = hints(type(instance))
    for name in fields(type(instance)):
        value = check_value(name, getattr(instance, name), annotations[name])
        object.__setattr__(instance, name, value)


def describe(cls: type) -> list[Option]:
    """Return all options of a dataclass."""
    annotations = hints(cls)
    options = []
    for f in dataclasses.fields(cls):
        kinds, rules, text = _parts(annotations[f.name])
        default = None if f.default is dataclasses.MISSING else f.default
        choice = choice_of(annotations[f.name])
        if choice is not None and default is not None:
            default = default.name
        options.append(Option(f.name, _words(kinds, rules) if choice is None else _choice_words(choice), default, text))
    return options


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
