"""Names of methods in recipes: a name of `ALGORITHMS`, or `module:Class` for a method of your own."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

from fedslr.algorithms import ALGORITHMS
from fedslr.core import plugins, schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, suggest

Method = type[Algorithm[Any, Any, Any]]
FOLDER_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")
"""A method's name is also the name of a folder."""


def find(name: object, where: str = "algorithm.name") -> Method:
    """Return the method of this name; `where` is the option that gave the name, for error messages."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if not isinstance(name, str) or not plugins.is_name(name):
        hint = f"{suggest(str(name), ALGORITHMS)} (or module:Class of your own)"
        raise FedslrError(f"{where}: got {schema.show(name)}, no such method; {hint}")
    found = plugins.find(where, name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise FedslrError(f"{where}: got '{name}', expected a subclass of fedslr.Algorithm")
    require_usable(found)
    return found


def require_usable(cls: Method) -> None:
    """Refuse a class that is not a complete method."""
    if missing := sorted(cls.__abstractmethods__):
        raise FedslrError(f"algorithm: {cls.__name__} lacks {', '.join(missing)}; write these functions")
    if "__dataclass_fields__" not in vars(cls):
        raise FedslrError(f"algorithm: {cls.__name__} is not a dataclass; write @dataclass(frozen=True) above it")
    name = vars(cls).get("name")
    if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
        raise FedslrError(
            f'algorithm: {cls.__name__} has no valid name of its own; write name: ClassVar[str] = "…" in the class, '
            "with letters, digits, '.', '_', '+' or '-'"
        )
    if ALGORITHMS.get(name, cls) is not cls:
        raise FedslrError(f"algorithm: {cls.__name__} has the name '{name}' of another method; choose another name")


def name_of(cls: Method) -> str:
    """Return the name by which config.toml calls a method."""
    return cls.name if cls in ALGORITHMS.values() else f"{cls.__module__}:{cls.__qualname__}"


def is_importable(cls: Method) -> bool:
    """Return whether a recipe can name a method: a class at the top of a module whose fields all have defaults."""
    module = sys.modules.get(cls.__module__)
    at_top = cls.__module__ != "__main__" and getattr(module, cls.__qualname__, None) is cls
    return at_top and all(f.default is not dataclasses.MISSING for f in dataclasses.fields(cls))  # type: ignore[arg-type]


def short(name: str) -> str:
    """Return `Class` for `module:Class`; return any other name as it is."""
    return name.rpartition(":")[2].rpartition(".")[2]
