"""The figures of the FedSLR paper's Tables 1 and 2 (TMLR 2023), by data set and split."""

from __future__ import annotations

from typing import NamedTuple

COLUMNS = (
    "cifar10-iid",
    "cifar10-dirichlet0.1",
    "cifar100-iid",
    "cifar100-dirichlet0.1",
    "tinyimagenet-iid",
    "tinyimagenet-dirichlet0.1",
)
"""The columns of Table 1: data set and split. Folders under `results/` have these names."""


class Row(NamedTuple):
    """A row of Table 1: a method, which of its models the paper evaluates, and the accuracy in % in every column."""

    method: str
    model: str
    accuracies: tuple[float, ...]


ROWS = (
    Row("scaffold", "global", (91.33, 82.91, 66.68, 59.48, 43.13, 34.11)),
    Row("feddyn", "global", (92.61, 90.14, 68.68, 64.29, 43.52, 38.02)),
    Row("fedavg", "global", (90.25, 82.89, 61.92, 55.78, 35.17, 30.56)),
    Row("fedslr", "global", (91.73, 87.52, 66.40, 64.22, 41.32, 35.13)),
    Row("perfedavg", "personal", (89.57, 91.55, 57.10, 63.73, 34.41, 37.52)),
    Row("lgfedavg", "personal", (38.32, 81.35, 12.96, 49.90, 5.34, 35.68)),
    Row("fedrep", "personal", (89.28, 93.41, 15.36, 60.42, 5.48, 46.42)),
    Row("ditto", "personal", (89.16, 94.39, 59.36, 78.67, 34.78, 58.30)),
    Row("apfl", "personal", (75.11, 87.11, 30.99, 61.14, 20.16, 48.02)),
    Row("local", "personal", (38.30, 82.17, 10.97, 47.99, 3.86, 34.28)),
    Row("fedspa", "personal", (88.31, 93.19, 48.00, 73.87, 30.39, 53.76)),
    Row("fedslr", "personal", (89.72, 95.30, 64.95, 82.19, 38.20, 59.13)),
)
"""Table 1. The authors' code trains what it calls FedRep in the way of FedPer."""


class Cost(NamedTuple):
    """A cell of Table 2, which covers the Dirichlet splits: gigabytes sent, and millions of parameters."""

    gigabytes: float
    parameters_global: float
    parameters_personal: float


_DENSE = Cost(893.92, 11.17, 11.17)
_SPECIAL: dict[str, dict[str, Cost]] = {
    "scaffold": dict.fromkeys(COLUMNS, Cost(1787.83, 11.17, 11.17)),
    "apfl": dict.fromkeys(COLUMNS, Cost(893.92, 11.17, 22.35)),
    "fedspa": dict.fromkeys(COLUMNS, Cost(446.96, 5.59, 5.59)),
    "local": dict.fromkeys(COLUMNS, Cost(0.0, 11.17, 11.17)),
    "fedslr": {
        "cifar10-dirichlet0.1": Cost(626.89, 3.51, 3.96),
        "cifar100-dirichlet0.1": Cost(722.60, 5.54, 6.69),
        "tinyimagenet-dirichlet0.1": Cost(730.00, 5.34, 7.59),
    },
    "lgfedavg": {
        "cifar10-dirichlet0.1": Cost(0.41, 11.17, 11.17),
        "cifar100-dirichlet0.1": Cost(4.08, 11.17, 11.17),
        "tinyimagenet-dirichlet0.1": Cost(8.13, 11.17, 11.17),
    },
    "fedrep": {
        "cifar10-dirichlet0.1": Cost(893.51, 11.17, 11.17),
        "cifar100-dirichlet0.1": Cost(889.84, 11.17, 11.17),
        "tinyimagenet-dirichlet0.1": Cost(885.78, 11.17, 11.17),
    },
}


def accuracy(method: str, model: str, column: str) -> float | None:
    """Return the paper's accuracy in %, or None where Table 1 has none."""
    found = {(row.method, row.model): row.accuracies[COLUMNS.index(column)] for row in ROWS}
    return found.get((method, model))


def cost(method: str, column: str) -> Cost | None:
    """Return what Table 2 says of a method; the methods it does not name send dense models like FedAvg."""
    if column.endswith("-iid"):
        return None
    return _SPECIAL.get(method, {}).get(column, _DENSE)
