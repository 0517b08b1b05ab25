"""Runs along the values of a hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedslr.report.curves import evaluations
from fedslr.report.run_groups import Group


class Sweep(NamedTuple):
    """Groups along the values of one hyperparameter, one line for every combination of the other settings."""

    key: str
    lines: dict[str, list[tuple[float, Group]]]


def find_sweep(groups: Sequence[Group]) -> Sweep | None:
    """Return the sweep over the first numeric setting that varies while the others stay equal, or None."""
    for key in groups[0].labels:
        values = [_number(g.labels[key]) for g in groups]
        if len({v for v in values if v is not None}) < 2:
            continue
        lines: dict[str, list[tuple[float, Group]]] = {}
        for value, group in zip(values, groups, strict=True):
            if value is not None:
                rest = {k: v for k, v in group.labels.items() if k != key}
                lines.setdefault(Group(rest, []).name, []).append((value, group))
        if any(len({value for value, _ in line}) > 1 for line in lines.values()):
            return Sweep(key, {name: sorted(line, key=lambda pair: pair[0]) for name, line in lines.items()})
    return None


def final_accuracies(line: Sequence[tuple[float, Group]], model: str) -> list[tuple[float, list[float]]]:
    """Return the last accuracy of every run at each value of a sweep that has been evaluated."""
    seen = [(x, evaluations(group, f"accuracy_{model}")) for x, group in line]
    return [(x, samples[-1].values) for x, samples in seen if samples]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def spans_decades(values: Iterable[float]) -> bool:
    """Return whether values are better seen on a logarithmic axis."""
    known = list(values)
    return min(known) > 0 and max(known) / min(known) >= 20
