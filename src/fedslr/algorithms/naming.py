"""The names of methods in recipes: a name of the table, or `module:Class` for one of your own."""

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
"""A method's name becomes the name of a folder."""


def find(name: object, where: str = "algorithm.name") -> Method:
    """Return the method that a recipe names."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if not isinstance(name, str) or not plugins.is_name(name):
        hint = f"{suggest(str(name), ALGORITHMS)} (or module:Class of your own)"
        raise FedslrError(f"{where}: got {schema.show(name)}, no such method; {hint}")
    found = plugins.find(where, name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise FedslrError(f"{where}: got '{name}', expected a class that is a fedslr.Algorithm")
    require_usable(found)
    return found


def require_usable(cls: Method) -> None:
    """Refuse a class that is no complete method."""
    if missing := sorted(cls.__abstractmethods__):
        raise FedslrError(f"algorithm: {cls.__name__} lacks {', '.join(missing)}")
    if "__dataclass_fields__" not in vars(cls):
        raise FedslrError(f"algorithm: {cls.__name__} is no dataclass; write @dataclass(frozen=True) above the class")
    name = vars(cls).get("name")
    if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
        raise FedslrError(
            f"algorithm: {cls.__name__} has no name of its own of letters, digits, '.', '_', '+' or '-'; "
            'write name: ClassVar[str] = "…" in the class'
        )
    if cls.server_sees not in ("mean", "each"):
        raise FedslrError(f"algorithm: {cls.__name__}.server_sees is {cls.server_sees!r}, expected 'mean' or 'each'")
    if ALGORITHMS.get(name, cls) is not cls:
        raise FedslrError(f"algorithm: {cls.__name__} has the name '{name}' of another method; give it its own")


def name_of(cls: Method) -> str:
    """Return the name of a method in config.toml."""
    return cls.name if cls in ALGORITHMS.values() else f"{cls.__module__}:{cls.__qualname__}"


def is_importable(cls: Method) -> bool:
    """Return whether a recipe can name a method: a class at the top of a module, with settings for parameters."""
    module = sys.modules.get(cls.__module__)
    at_top = cls.__module__ != "__main__" and getattr(module, cls.__qualname__, None) is cls
    return at_top and all(f.default is not dataclasses.MISSING for f in dataclasses.fields(cls))  # type: ignore[arg-type]


def short(name: str) -> str:
    """Return the class of `module:Class`; a name of the table stays as it is."""
    return name.rpartition(":")[2].rpartition(".")[2]
