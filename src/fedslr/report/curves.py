"""The numbers behind figures, from the records of runs: whoever draws them, they are the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from fedslr.report import tables
from fedslr.report.tables import NOT_SHOWN, SEEDS, Group, Run

BASELINE = "fedavg"
"""What the paper's violins are relative to."""


class Sample(NamedTuple):
    """One evaluation of the runs of a group."""

    round: int
    bytes: float
    """Sent by then, both ways; the mean over the runs."""
    values: list[float]
    """One for every run."""

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by what varies between them: methods best first, the values of a sweep in their order."""
    return sorted(map(counted, tables.group(runs)), key=_place)


def _place(group: Group) -> float:
    found = evaluations(group, "accuracy_personal") if "method" in group.labels else []
    return -found[-1].mean if found else 0.0


def counted(group: Group) -> Group:
    """A group without runs that are unfinished, unless all of them are."""
    return group._replace(runs=[r for r in group.runs if r.finished] or group.runs)


def evaluations(group: Group, key: str) -> list[Sample]:
    """A figure of the records in the rounds in which every run of a group has it."""
    found = [_by_round(run.records, key) for run in group.runs]
    shared = sorted(set.intersection(*(set(one) for one in found)))
    return [Sample(n, math.fsum(one[n][0] for one in found) / len(found), [one[n][1] for one in found]) for n in shared]


def _by_round(records: Sequence[Mapping[str, Any]], key: str) -> dict[int, tuple[float, float]]:
    """Round to the bytes sent by then and the figure; what is missing or no number is left out."""
    sent = accumulate(r.get("bytes_down", 0) + r.get("bytes_up", 0) for r in records)
    pairs = ((r["round"], so_far, r.get(key)) for r, so_far in zip(records, sent, strict=True))
    return {n: (so_far, v) for n, so_far, v in pairs if isinstance(v, int | float) and math.isfinite(v)}


def models(group: Group) -> tuple[str, ...]:
    """The models worth showing: the personal ones, and the global one where there is one that differs from them."""
    records = [r for run in group.runs for r in run.records if r.get("accuracy_global_per_client") is not None]
    differs = any(r.get("accuracy_personal_per_client") != r["accuracy_global_per_client"] for r in records)
    return ("personal", "global") if differs else ("personal",)


def by_client(run: Run, key: str) -> dict[int, float]:
    """The last evaluation of a run: client to its figure."""
    for record in reversed(run.records):
        if each := record.get(key):
            whose = record.get("evaluated") or range(len(each))
            return {c: v for c, v in zip(whose, each, strict=True) if v is not None}
    return {}


def baselines(runs: Iterable[Run]) -> dict[str, Run]:
    """FedAvg's runs, by what a run must share with one to be compared client by client."""
    return {_setting(r): r for r in runs if r.config.get("algorithm.name") == BASELINE}


def is_baseline(group: Group) -> bool:
    return any(r.config.get("algorithm.name") == BASELINE for r in group.runs)


def has_baseline(run: Run, against: Mapping[str, Run]) -> bool:
    return _setting(run) in against


def relative(run: Run, against: Mapping[str, Run], model: str) -> dict[int, float]:
    """Every client's accuracy less its accuracy under FedAvg; nothing where there is no such run."""
    base = against.get(_setting(run))
    key = f"accuracy_{model}_per_client"
    before = {} if base is None else by_client(base, "accuracy_global_per_client")
    return {c: v - before[c] for c, v in by_client(run, key).items() if c in before}


def _setting(run: Run) -> str:
    """All of a run's configuration but its method; seeds count, devices do not."""
    apart = NOT_SHOWN.difference(SEEDS)
    return repr(sorted((k, v) for k, v in run.config.items() if not k.startswith("algorithm.") and k not in apart))


def per_message(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """A figure of every round, for one of its clients."""
    return [(r["round"], r[key] / len(r["clients"])) for r in records if r["clients"] and key in r]


def communication(run: Run, megabits: float, milliseconds: float) -> list[tuple[int, float]]:
    """Seconds that one client's messages of a round take over a line: its bytes at this speed, and two delays."""
    down, up = per_message(run.records, "bytes_down"), per_message(run.records, "bytes_up")
    return [
        (n, 8 * (a + b) / (1e6 * megabits) + (2 * milliseconds / 1000 if a + b else 0))
        for (n, a), (_, b) in zip(down, up, strict=True)
    ]


def mean_of(lines: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Several lines as one: at every place the mean of those that come so far."""
    places: dict[int, list[float]] = {}
    for line in lines:
        for x, y in line:
            places.setdefault(x, []).append(y)
    return [(x, fmean(values)) for x, values in sorted(places.items())]


BINS = 160


def binned(points: Sequence[tuple[float, float]], most: int = BINS) -> list[tuple[float, float]]:
    """At most so many points: the means of equally many neighbours each."""
    known = [(x, y) for x, y in points if math.isfinite(y)]
    if len(known) <= most:
        return known
    parts = np.array_split(np.array(known), most)
    # A bin stands at its last round, so that the axis ends where the run does.
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


class Sensitivity(NamedTuple):
    """What a sweep shows: groups along the values of a key, one line for every other setting."""

    key: str
    lines: dict[str, list[tuple[float, Group]]]


def sensitivity(groups: Sequence[Group]) -> Sensitivity | None:
    """The first key that has numbers, and more than one for the same other settings; None where there is none."""
    for key in groups[0].labels:
        values = [number(g.labels[key]) for g in groups]
        if len({v for v in values if v is not None}) < 2:
            continue
        lines: dict[str, list[tuple[float, Group]]] = {}
        for value, group in zip(values, groups, strict=True):
            if value is not None:
                rest = {k: v for k, v in group.labels.items() if k != key}
                lines.setdefault(Group(rest, []).name, []).append((value, group))
        if any(len({value for value, _ in line}) > 1 for line in lines.values()):
            return Sensitivity(key, {name: sorted(line, key=lambda pair: pair[0]) for name, line in lines.items()})
    return None


def ends(line: Sequence[tuple[float, Group]], model: str) -> list[tuple[float, list[float]]]:
    """The last accuracy of every run, at each value of a sweep that has been evaluated."""
    seen = [(x, evaluations(group, f"accuracy_{model}")) for x, group in line]
    return [(x, samples[-1].values) for x, samples in seen if samples]


def number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def spans_decades(values: Iterable[float]) -> bool:
    """Whether numbers are better seen by their order of magnitude."""
    known = list(values)
    return min(known) > 0 and max(known) / min(known) >= 20


def label_counts(run: Run) -> np.ndarray | None:
    """Training samples by client and label, of a run that tells them."""
    try:
        counts = np.array(json.loads((run.folder / "labels.json").read_text("utf-8"))["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    there = counts.ndim == 2 and counts.size and np.issubdtype(counts.dtype, np.integer) and counts.min() >= 0
    return counts if there else None
