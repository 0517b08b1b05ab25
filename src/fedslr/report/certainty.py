"""Certainty of results: paired differences over seeds, and the trend of the last rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from fedslr.report.curves import Line
from fedslr.report.run_groups import SEED_KEYS, Group
from fedslr.report.saved_runs import Run

MIN_POINTS = 3
"""A trend is fitted to this many evaluations, even if the last tenth of the rounds has fewer."""
MIN_CHANGE = 0.1
"""A smaller change over a tenth of the rounds, in percentage points, counts as none."""
Value = Callable[[Run], float | None]


class Estimate(NamedTuple):
    """A mean or a slope with the half width of its 95 % t-interval, which is infinite for a single value."""

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def times(self, factor: float) -> Estimate:
        return Estimate(factor * self.value, factor * self.half)


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    return float(stdtrit(freedom, 0.975))


def paired_difference(one: Group, other: Group, value: Value) -> Estimate | None:
    """Return the mean of a figure of one group less that of another over the seeds of both; None without such seeds."""
    ours, theirs = ({repr([*map(r.config.get, SEED_KEYS)]): value(r) for r in group.runs} for group in (one, other))
    pairs = [(v, theirs.get(seed)) for seed, v in ours.items()]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    if len(found) < 2:
        return Estimate(found[0], math.inf) if found else None
    return Estimate(fmean(found), student_t(len(found) - 1) * stdev(found) / math.sqrt(len(found)))


def separable_best(groups: Sequence[Group], value: Value) -> Group | None:
    """Return the group that is better than every other one with 95 % certainty, or None."""
    known = [group for group in groups if any(value(run) is not None for run in group.runs)]
    for one in known if len(known) > 1 else []:
        found = [paired_difference(one, other, value) for other in known if other is not one]
        if all(each and each.low > 0 for each in found):
            return one
    return None


def final_trend(lines: Sequence[Line]) -> Estimate | None:
    """Return the slope of all lines over the last tenth of the rounds; None if there are too few evaluations.

    A line is one seed's accuracy over rounds. Least squares; every line has its own intercept.
    """
    if not lines or min(map(len, lines)) < MIN_POINTS:
        return None
    late = (max(MIN_POINTS, sum(x >= 0.9 * line[-1][0] for x, _ in line)) for line in lines)
    tails = [np.array(line[-number:], float) for line, number in zip(lines, late, strict=True)]
    x, y = np.concatenate([tail - tail.mean(0) for tail in tails]).T
    slope, freedom = float(x @ y / (x @ x)), len(x) - len(tails) - 1
    variance = float(np.square(y - slope * x).sum() / freedom / (x @ x))
    return Estimate(slope, student_t(freedom) * math.sqrt(variance))


def trend_in_words(trend: Estimate, rounds: int) -> str:
    """Return whether an accuracy in per cent still changed at the end of so many rounds."""
    if abs(trend.value) * rounds / 10 < MIN_CHANGE:
        return "level"
    return "still rising" if trend.low > 0 else "still falling" if trend.high < 0 else "no clear trend"
