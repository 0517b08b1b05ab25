"""The numbers behind the figures of reports and papers, from the records of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fedslr.report.run_groups import SEED_KEYS, UNLABELLED_KEYS, Group, group_runs
from fedslr.report.saved_runs import Run

BASELINE = "fedavg"
"""The method that accuracies are compared with, as in the paper."""


class Sample(NamedTuple):
    """One evaluation of the runs of a group."""

    round: int
    bytes: float
    """Bytes sent until then in both directions, the mean over the runs."""
    values: list[float]
    """One for every run."""

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


def ranked_groups(runs: Sequence[Run]) -> list[Group]:
    """Return the groups to draw: methods by their accuracy, best first; the values of a sweep in their order.

    Unfinished runs count only in a group that has no finished one.
    """

    def place(group: Group) -> float:
        found = evaluations(group, "accuracy_personal") if "method" in group.labels else []
        return -found[-1].mean if found else 0.0

    groups = group_runs(runs)
    return sorted((g._replace(runs=[r for r in g.runs if r.finished] or g.runs) for g in groups), key=place)


def evaluations(group: Group, key: str) -> list[Sample]:
    """Return a figure of the records in the rounds in which every run of a group has it."""
    found = [_by_round(run.records, key) for run in group.runs]
    shared = sorted(set.intersection(*(set(one) for one in found)))
    return [Sample(n, math.fsum(one[n][0] for one in found) / len(found), [one[n][1] for one in found]) for n in shared]


def _by_round(records: Sequence[Mapping[str, Any]], key: str) -> dict[int, tuple[float, float]]:
    """Map each round to the bytes sent until then and a figure; skip missing and non-finite values."""
    sent = accumulate(r.get("bytes_down", 0) + r.get("bytes_up", 0) for r in records)
    pairs = ((r["round"], so_far, r.get(key)) for r, so_far in zip(records, sent, strict=True))
    return {n: (so_far, v) for n, so_far, v in pairs if isinstance(v, int | float) and math.isfinite(v)}


def models(group: Group) -> tuple[str, ...]:
    """Return the models to show: the personal ones, and the global one if it differs from them."""
    records = [r for run in group.runs for r in run.records if r.get("accuracy_global_per_client") is not None]
    differs = any(r.get("accuracy_personal_per_client") != r["accuracy_global_per_client"] for r in records)
    return ("personal", "global") if differs else ("personal",)


def by_client(run: Run, key: str) -> dict[int, float]:
    """Return a figure of every client from the last evaluation of a run."""
    for record in reversed(run.records):
        if each := record.get(key):
            whose = record.get("evaluated") or range(len(each))
            return {c: v for c, v in zip(whose, each, strict=True) if v is not None}
    return {}


def baselines(runs: Iterable[Run]) -> dict[str, Run]:
    """Return FedAvg's runs by the settings that a run must share to be compared with one client by client."""
    return {_setting(r): r for r in runs if r.config.get("algorithm.name") == BASELINE}


def is_baseline(group: Group) -> bool:
    return any(r.config.get("algorithm.name") == BASELINE for r in group.runs)


def has_baseline(run: Run, against: Mapping[str, Run]) -> bool:
    return _setting(run) in against


def relative(run: Run, against: Mapping[str, Run], model: str) -> dict[int, float]:
    """Return every client's accuracy less its accuracy under FedAvg; nothing if no such run is given."""
    base = against.get(_setting(run))
    key = f"accuracy_{model}_per_client"
    before = {} if base is None else by_client(base, "accuracy_global_per_client")
    return {c: v - before[c] for c, v in by_client(run, key).items() if c in before}


def _setting(run: Run) -> str:
    """Return all settings of a run except its method; seeds count, devices do not."""
    apart = UNLABELLED_KEYS.difference(SEED_KEYS)
    return repr(sorted((k, v) for k, v in run.config.items() if not k.startswith("algorithm.") and k not in apart))


def communication(run: Run, megabits: float, milliseconds: float) -> list[tuple[int, float]]:
    """Return the seconds that one client's messages of a round take: its bytes at this bandwidth, and two delays."""
    found = []
    for r in run.records:
        if r["clients"]:
            size = r["bytes_down"] / len(r["clients"]) + r["bytes_up"] / len(r["clients"])
            found.append((r["round"], 8 * size / (1e6 * megabits) + (2 * milliseconds / 1000 if size else 0)))
    return found


def mean_of(lines: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the mean of several lines at every place, over the lines that reach it."""
    places: dict[int, list[float]] = {}
    for line in lines:
        for x, y in line:
            places.setdefault(x, []).append(y)
    return [(x, fmean(values)) for x, values in sorted(places.items())]


MAX_BINS = 160


def binned(points: Sequence[tuple[float, float]], most: int = MAX_BINS) -> list[tuple[float, float]]:
    """Return at most `most` points, each the mean of equally many neighbours."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    if len(known) <= most:
        return known
    parts = np.array_split(np.array(known), most)
    # A bin stands at its last round, so that the axis ends where the run does.
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]
