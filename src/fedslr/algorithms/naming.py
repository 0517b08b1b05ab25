"""How recipes name methods: as the table does, or `module:Class` for a person's own."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fedslr.algorithms import ALGORITHMS
from fedslr.core import plugins, schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, suggest

Method = type[Algorithm[Any, Any]]
SHORT = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")
"""What a method may be called: the name becomes a folder's."""


def find(name: object, where: str = "algorithm.name") -> Method:
    """The method a recipe names."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if not isinstance(name, str) or not plugins.is_name(name):
        hint = f"{suggest(str(name), ALGORITHMS)} (or module:Class of your own)"
        raise FedslrError(f"{where}: got {schema.show(name)}, no such method; {hint}")
    found = plugins.find(where, name)
    if wrong := _mistake(found):
        raise FedslrError(f"{where}: got '{name}', {wrong}")
    cls: Method = found
    return cls


def require_usable(cls: Method, folder: bool = False) -> None:
    """Refuse a method that could not be told of, in a run folder least of all."""
    if not dataclasses.is_dataclass(cls):
        raise FedslrError(f"algorithm: {cls.__name__} is no dataclass; expected @dataclass(frozen=True) on it")
    if wrong := _misnamed(cls, folder) or _misshapen(cls):
        raise FedslrError(f"algorithm: got {cls.__name__}, {wrong}")


def name_of(cls: Method) -> str:
    """What config.toml calls a method; `is_found` tells whether a recipe finds it there."""
    return cls.name if is_in_table(cls) else f"{cls.__module__}:{cls.__qualname__}"


def is_in_table(cls: Method) -> bool:
    return cls in ALGORITHMS.values()


def is_found(cls: Method) -> bool:
    """Whether a recipe can name a method: not those of scripts, notebooks and functions."""
    return is_in_table(cls) or _mistake(cls) is None


def are_same(before: str, now: str, called: str) -> bool:
    """Whether a run's name for its method may be that of this one, which is called so.

    Its file may have been moved, or have been a script that is a module now; where the former is still there, it is
    another method. A run folder once had nothing but what the method is called.
    """
    if before == now or ":" not in now:
        return before == now
    moved = ":" in before and short(before) == short(now) and not plugins.is_there(before)
    return before == called or moved


def short(name: str) -> str:
    """The class of `module:Class`; a name of the table is its own."""
    return name.rpartition(":")[2].rpartition(".")[2]


def mistakes(algorithm: Algorithm[Any, Any]) -> AbstractContextManager[None]:
    """A method of a person's own is told where it fails. What the machine lacks is not the method's mistake."""
    cls = type(algorithm)
    if is_in_table(cls):
        return nullcontext()
    machine = (OSError, MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))
    return plugins.mistakes("algorithm", name_of(cls), cls, machine)


_NAMELESS = 'but it has no name; expected name: ClassVar[str] = "…" in it'


def _misnamed(cls: Method, folder: bool = True) -> str | None:
    """Why a method has no name that can be told, or be a folder's."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        return _NAMELESS
    if folder and not SHORT.fullmatch(name):
        return f"but its name is {schema.show(name)}, expected letters, digits, '.', '_', '+' or '-'"
    return None


def _misshapen(cls: Method) -> str | None:
    """Which function of a method cannot be called as all methods' are."""
    for name, usual in inspect.getmembers(Algorithm, inspect.isfunction):
        own = inspect.getattr_static(cls, name)
        if name.startswith("_") or not inspect.isfunction(own):
            continue
        usually = inspect.signature(usual).parameters.values()
        try:
            takes = inspect.signature(own, follow_wrapped=False)
        except ValueError:  # there is none to look at
            continue
        try:
            takes.bind(*(p.name for p in usually if p.default is p.empty))
        except TypeError:
            return f"but its {name} takes {takes}, expected ({', '.join(p.name for p in usually)})"
    return None


def _mistake(found: Any) -> str | None:
    """Why something that a recipe names is no method that can be run from one."""
    if not (isinstance(found, type) and issubclass(found, Algorithm) and dataclasses.is_dataclass(found)):
        return "expected a dataclass that is a fedslr.Algorithm"
    if missing := sorted(found.__abstractmethods__):
        return f"but it lacks {', '.join(missing)}"
    if wrong := _NAMELESS if "name" in schema.fields(found) else _misnamed(found):
        return wrong
    if wrong := _misshapen(found):
        return wrong
    if found.name in ALGORITHMS:
        return f"but its name is '{found.name}', another method's; expected one of its own"
    module = sys.modules.get(found.__module__)
    if found.__module__ == "__main__" or getattr(module, found.__qualname__, None) is not found:
        return "but a recipe cannot name it; expected a class at the top of a module"
    plain = [k for k, kind in inspect.get_annotations(found).items() if "ClassVar" not in str(kind)]
    if plain and "__dataclass_fields__" not in vars(found):
        return f"but '{plain[0]}' is no hyperparameter; expected @dataclass(frozen=True) on the class"
    return schema.unsettable(found)
