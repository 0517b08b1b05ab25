"""The table of methods: a recipe's name to the dataclass that implements it. One file each."""

from __future__ import annotations

from typing import Any

from fedslr.algorithms.fedavg import FedAvg
from fedslr.algorithms.feddyn import FedDyn
from fedslr.algorithms.fedslr import FedSLR
from fedslr.types import Algorithm

ALGORITHMS: dict[str, type[Algorithm[Any, Any]]] = {cls.name: cls for cls in (FedSLR, FedAvg, FedDyn)}

__all__ = ["ALGORITHMS", "FedAvg", "FedDyn", "FedSLR"]
