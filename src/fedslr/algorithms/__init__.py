"""The table of methods: a recipe's name to the dataclass that implements it. One file each, or `module:Class`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from fedslr import plugins, schema
from fedslr.algorithms.apfl import APFL
from fedslr.algorithms.designs import GPGD, LPGD, LowRankLowRank, SparseLowRank, SparseSparse
from fedslr.algorithms.ditto import Ditto
from fedslr.algorithms.fedavg import FedAvg
from fedslr.algorithms.feddyn import FedDyn
from fedslr.algorithms.fedprox import FedProx
from fedslr.algorithms.fedslr import FedSLR
from fedslr.algorithms.fedspa import FedSpa
from fedslr.algorithms.layers import FedPer, FedRep, LGFedAvg
from fedslr.algorithms.local import Local
from fedslr.algorithms.perfedavg import PerFedAvg
from fedslr.algorithms.scaffold import Scaffold
from fedslr.errors import FedslrError, suggest
from fedslr.types import Algorithm

METHODS: tuple[type[Algorithm[Any, Any]], ...] = (
    FedSLR,
    FedAvg,
    FedProx,
    FedDyn,
    Scaffold,
    PerFedAvg,
    LGFedAvg,
    FedPer,
    FedRep,
    Ditto,
    APFL,
    Local,
    FedSpa,
    LPGD,
    GPGD,
    SparseSparse,
    SparseLowRank,
    LowRankLowRank,
)

ALGORITHMS: dict[str, type[Algorithm[Any, Any]]] = {cls.name: cls for cls in METHODS}


def find(name: object, where: str = "algorithm.name") -> type[Algorithm[Any, Any]]:
    """The method a recipe names: one of the table, or `module:Class` of a person's own."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if not isinstance(name, str) or not plugins.is_name(name):
        hint = f"{suggest(str(name), ALGORITHMS)} (or module:Class of your own)"
        raise FedslrError(f"{where}: got {schema.show(name)}, no such method; {hint}")
    found = plugins.find(where, name)
    if not (isinstance(found, type) and issubclass(found, Algorithm) and dataclasses.is_dataclass(found)):
        raise FedslrError(f"{where}: got '{name}', expected a dataclass that is a fedslr.Algorithm")
    if missing := [*sorted(found.__abstractmethods__), *(() if hasattr(found, "name") else ("name",))]:
        raise FedslrError(f"{where}: got '{name}', but it lacks {', '.join(missing)}")
    return found


def name_in_recipe(cls: type[Algorithm[Any, Any]]) -> str | None:
    """How a recipe names a method; None if none can: the class is a script's, a notebook's or a function's own."""
    if ALGORITHMS.get(cls.name) is cls:
        return cls.name
    module = sys.modules.get(cls.__module__)
    found = cls.__module__ != "__main__" and getattr(module, cls.__qualname__, None) is cls
    return f"{cls.__module__}:{cls.__qualname__}" if found else None


__all__ = [
    "ALGORITHMS",
    "APFL",
    "GPGD",
    "LPGD",
    "Ditto",
    "FedAvg",
    "FedDyn",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FedSpa",
    "LGFedAvg",
    "Local",
    "LowRankLowRank",
    "PerFedAvg",
    "Scaffold",
    "SparseLowRank",
    "SparseSparse",
]
