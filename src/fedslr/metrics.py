"""What is measured of a run: accuracies over clients, sizes of models."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

PerClient = list[float | None]


class Evaluation(NamedTuple):
    """Every client's accuracy under the global and under its own model; None where a method has no global model."""

    global_: PerClient | None
    personal: PerClient


def average(values: Sequence[float | None] | None) -> float | None:
    """The plain average over the clients that have test data."""
    known = [v for v in values or [] if v is not None]
    return fmean(known) if known else None


class Sizes(NamedTuple):
    """Numbers a deployed model needs."""

    dense: int
    global_: int
    personal: list[int]

    def summary(self) -> dict[str, float]:
        return {
            "dense": self.dense,
            "global": self.global_,
            "personal": fmean(self.personal),
            "personal_std": pstdev(self.personal),
        }
