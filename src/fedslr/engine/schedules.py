"""Schedules: the step size of every round."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from fedslr.core.schema import countable, countable_from_zero, fraction, positive


class Course(NamedTuple):
    """The settings that schedules read."""

    rounds: int
    lr: float
    lr_decay: float


@dataclass(frozen=True)
class Schedule(ABC):
    """A rule for the step size of a round, counted from 0, relative to the setting `lr`."""

    name: ClassVar[str]
    planned: ClassVar[bool] = False
    """Whether a step size depends on the total number of rounds. Such a run cannot be extended."""

    warmup: Annotated[int, countable_from_zero, "first rounds in which the step size rises linearly to lr"] = 0

    def ratio(self, number: int, course: Course) -> float:
        """Return η/lr for a round: linear during the warm-up, then the rule for the rounds that are left."""
        if number < self.warmup:
            return (number + 1) / self.warmup
        return self.rule(number - self.warmup, course._replace(rounds=course.rounds - self.warmup))

    @abstractmethod
    def rule(self, t: int, course: Course) -> float:
        """Return η/lr for the round t after the warm-up."""


@dataclass(frozen=True)
class Exponential(Schedule):
    """lr·lr_decayᵗ."""

    name: ClassVar[str] = "exponential"

    def rule(self, t: int, course: Course) -> float:
        return course.lr_decay**t


@dataclass(frozen=True)
class Constant(Schedule):
    """lr."""

    name: ClassVar[str] = "constant"

    def rule(self, t: int, course: Course) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """lr·factorᵏ after k periods."""

    name: ClassVar[str] = "step"

    period: Annotated[int, countable, "rounds between two changes of the step size"]
    factor: Annotated[float, fraction, "factor of the step size at every change"] = 0.1

    def rule(self, t: int, course: Course) -> float:
        return self.factor ** (t // self.period)


@dataclass(frozen=True)
class Cosine(Schedule):
    """lr_min + (lr − lr_min)(1 + cos(πt/(T − 1)))/2 for T rounds."""

    name: ClassVar[str] = "cosine"
    planned: ClassVar[bool] = True

    lr_min: Annotated[float | None, positive, "step size of the last round; lr/100 unless given"] = None

    def rule(self, t: int, course: Course) -> float:
        low = 0.01 if self.lr_min is None else self.lr_min / course.lr
        return low + (1 - low) * (1 + math.cos(math.pi * t / max(1, course.rounds - 1))) / 2


EXPONENTIAL = Exponential()
SCHEDULES: dict[str, type[Schedule]] = {cls.name: cls for cls in (Exponential, Constant, Step, Cosine)}
