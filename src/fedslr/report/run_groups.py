"""Runs grouped by the settings in which they differ; runs that differ only in their seed share a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedslr.report.saved_runs import Run

SEED_KEYS = ("seed", "data.seed")
UNLABELLED_KEYS = {
    *SEED_KEYS, "device", "checkpoint.every", "checkpoint.minutes", "evaluate.every", "diagnostics", "store"
}  # fmt: skip
"""Settings that do not change the experiment. They label a group only if nothing else tells runs of one seed apart."""


class Group(NamedTuple):
    """Runs that differ in their seed only."""

    labels: dict[str, str]
    runs: list[Run]

    @property
    def name(self) -> str:
        """All labels in one line."""
        return ", ".join(text if key == "method" else f"{key} {text}" for key, text in self.labels.items())


def group_runs(runs: Sequence[Run], beside: Sequence[Run] = ()) -> list[Group]:
    """Group runs by the settings that vary; a hyperparameter counts only if it varies within one method.

    No group holds a seed twice, because its mean would then count one experiment twice. Runs `beside` are in no
    group, but the labels also name the settings in which they differ.
    """
    every = [*runs, *beside]
    keys = sorted({k for r in every for k in r.config} - UNLABELLED_KEYS)
    shown = [k for k in keys if _varies(k, every)]
    shown = shown + _differing_among_equals(runs, shown) or ["algorithm.name"]
    titles = [_title(k, shown) for k in shown]
    titles = [title if titles.count(title) == 1 else key for title, key in zip(titles, shown, strict=True)]
    # A finished run knows the name of its method; an unfinished one only the name of the class.
    ordered = sorted(runs, key=lambda run: run.finished)
    methods = {_text(r.config.get("algorithm.name")): r.summary["algorithm"] for r in ordered}
    groups: dict[tuple[int, str], Group] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        alike = _values(run, [*shown, *SEED_KEYS])
        labels = dict(zip(titles, (_label(run, k, methods) for k in shown), strict=True))
        groups.setdefault((seen[alike], _values(run, shown)), Group(labels, [])).runs.append(run)
        seen[alike] += 1
    found = list(groups.values())
    return found if max(seen.values(), default=0) < 2 else list(map(_with_folder, found))


def _label(run: Run, key: str, methods: Mapping[str, str]) -> str:
    """Return a setting as text; a method's own name if no other method shares it."""
    text = _text(run.config.get(key))
    unique = key == "algorithm.name" and list(methods.values()).count(methods[text]) == 1
    return _text(methods[text]) if unique else text


def _values(run: Run, keys: Sequence[str]) -> str:
    return repr([run.config.get(k) for k in keys])


def _distinct(runs: Sequence[Run], keys: Sequence[str]) -> int:
    return len({_values(run, keys) for run in runs})


def _differing_among_equals(runs: Sequence[Run], shown: Sequence[str]) -> list[str]:
    """Return the unlabelled settings in which runs of one seed and of equal labels differ."""
    equal = [*shown, *SEED_KEYS]
    keys = sorted(UNLABELLED_KEYS.difference(SEED_KEYS))
    return [k for k in keys if _distinct(runs, [*equal, k]) > _distinct(runs, equal)]


def _with_folder(group: Group) -> Group:
    """Label a group with its folder, because the same experiment was run again in another one."""
    where = _text(group.runs[0].folder) if len(group.runs) == 1 else "–"
    return group._replace(labels={**group.labels, "folder": where})


def _varies(key: str, runs: Sequence[Run]) -> bool:
    within = ["algorithm.name"] if key.startswith("algorithm.") and key != "algorithm.name" else []
    return _distinct(runs, [*within, key]) > _distinct(runs, within)


def _title(key: str, shown: Sequence[str]) -> str:
    """Return the last part of a key if it is unambiguous."""
    if key == "algorithm.name":
        return "method"
    first, _, last = key.rpartition(".")
    if last == "name":
        return first
    return last if [k.rpartition(".")[2] for k in shown].count(last) == 1 else key


def _text(value: Any) -> str:
    return "–" if value is None else " ".join(str(value).split())
