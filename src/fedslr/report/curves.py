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
"""The paper compares the accuracy of every client with its accuracy under this method."""
MAX_BINS = 160
Line = Sequence[tuple[float, float]]


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
    """Return the groups to draw: methods by their headline metric, best first; the values of a sweep in their order.

    Unfinished runs count only in a group that has no finished one.
    """

    def place(group: Group) -> float:
        metric = group.runs[0].metric
        found = evaluations(group, metric.key("personal")) if "method" in group.labels else []
        return (-found[-1].mean if metric.larger_is_better else found[-1].mean) if found else 0.0

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
    shared, own = (group.runs[0].metric.key(model, per_client=True) for model in ("global", "personal"))
    records = [r for run in group.runs for r in run.records if r.get(shared) is not None]
    differs = any(r.get(own) != r[shared] for r in records)
    return ("personal", "global") if differs else ("personal",)


def by_client(run: Run, key: str) -> dict[int, float]:
    """Return a figure of every client from the last evaluation of a run."""
    for record in reversed(run.records):
        if each := record.get(key):
            clients = record.get("evaluated") or range(len(each))
            return {c: v for c, v in zip(clients, each, strict=True) if v is not None}
    return {}


def baselines(runs: Iterable[Run], method: str = BASELINE) -> dict[str, Run]:
    """Return a method's runs by the settings that another run must share to be compared with them by client."""
    return {setting(r): r for r in runs if r.config.get("algorithm.name") == method}


def is_baseline(group: Group, method: str = BASELINE) -> bool:
    return any(r.config.get("algorithm.name") == method for r in group.runs)


def relative(run: Run, against: Mapping[str, Run], model: str, base_model: str = "global") -> dict[int, float]:
    """Return every client's headline metric less that in the baseline; nothing if no such run is given."""
    base, metric = against.get(setting(run)), run.metric
    before = {} if base is None else by_client(base, metric.key(base_model, per_client=True))
    after = by_client(run, metric.key(model, per_client=True))
    return {c: v - before[c] for c, v in after.items() if c in before}


def setting(run: Run) -> str:
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


def binned(points: Line, most: int = MAX_BINS) -> list[tuple[float, float]]:
    """Return at most `most` points, each the mean of equally many neighbours."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    if len(known) <= most:
        return known
    parts = np.array_split(np.array(known), most)
    # A bin stands at its last round, so that the axis ends where the run does.
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def late_minimum(lines: Sequence[Line]) -> float | None:
    """Return the lowest value in the last third of all lines; None if earlier values leave it enough room."""
    values = [y for line in lines for _, y in line]
    late = min(y for line in lines for x, y in line if x >= line[-1][0] * 2 / 3)
    return late if 0 < max(values) - late < 0.5 * (max(values) - min(values)) else None


class Sweep(NamedTuple):
    """Groups along the values of one hyperparameter, one line for every combination of the other settings."""

    key: str
    lines: dict[str, list[tuple[float, Group]]]


def find_sweep(groups: Sequence[Group]) -> Sweep | None:
    """Return the sweep over the first numeric setting that varies while the others stay equal, or None."""
    for key in groups[0].labels:
        lines: dict[str, list[tuple[float, Group]]] = {}
        for group in groups:
            if (value := _number(group.labels[key])) is not None:
                rest = {k: v for k, v in group.labels.items() if k != key}
                lines.setdefault(Group(rest, []).name, []).append((value, group))
        if any(len({value for value, _ in line}) > 1 for line in lines.values()):
            return Sweep(key, {name: sorted(line, key=lambda pair: pair[0]) for name, line in lines.items()})
    return None


def final_scores(line: Sequence[tuple[float, Group]], model: str) -> list[tuple[float, list[float]]]:
    """Return the last headline metric of every run, shares in per cent, at each evaluated value of a sweep."""
    seen = [(x, group.runs[0].metric, group) for x, group in line]
    found = [(x, metric.factor, evaluations(group, metric.key(model))) for x, metric, group in seen]
    return [(x, [factor * v for v in samples[-1].values]) for x, factor, samples in found if samples]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether values are better seen on a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) >= 20
