"""Tables of finished runs: one row per group, mean ± standard deviation over seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from fedslr.report.number_text import format_bytes
from fedslr.report.run_groups import Group
from fedslr.report.saved_runs import Run
from fedslr.storage import statistics
from fedslr.storage.statistics import ACCURACY, Headline

Value = Callable[[Run], float | None]


class Column(NamedTuple):
    """A figure of a run, how it is written, and its name in a CSV file."""

    title: str
    key: str
    value: Value
    show: Callable[[float], str]
    within_run: Value | None = None
    """A standard deviation within one run, shown instead of the one over seeds."""
    sign: int = 0
    """1 if larger values are better, -1 if smaller ones are; 0 if bold would mislead."""

    def goodness(self, run: Run) -> float | None:
        """Return the value, negated if smaller values are better."""
        value = self.value(run)
        return None if value is None else self.sign * value

    def figures(self, runs: Sequence[Run]) -> tuple[float | None, float | None]:
        """Return the mean and the standard deviation over the runs of a group."""
        mean, deviation = mean_and_deviation([self.value(r) for r in runs])
        if self.within_run is None:
            return mean, deviation
        return mean, mean_and_deviation([self.within_run(r) for r in runs])[0]


def columns(pick: str = "last", clients: str = "all", metric: Headline = ACCURACY) -> list[Column]:
    """Return the paper's figures: accuracy or another metric, fairness, sizes, and bytes, also as the paper's GB."""
    choices = [c for c, usual in ((pick, "last"), (clients, "all")) if c != usual]
    chosen = f" ({', '.join(choices)})" if choices else ""

    name = "" if metric == ACCURACY else f" {metric.words}"
    unit = f"{name}{metric.unit}{chosen}"

    def score(model: str) -> Value:
        return lambda run: statistics.mean_over_clients(run.records, pick, clients, metric)[model]

    def show(value: float) -> str:
        return f"{100 * value:.2f}" if metric.is_share else f"{value:.4g}"

    def summary(table: str, key: str) -> Value:
        return lambda run: run.summary[table][key]

    def worst(run: Run) -> float | None:
        return statistics.worst_decile(run.records, pick, clients, metric=metric)

    sign = 1 if metric.larger_is_better else -1
    size, spread = summary("parameters", "personal"), summary("parameters", "personal_std")
    return [
        Column(f"global{unit}", metric.key("global"), score("global"), show, sign=sign),
        Column(f"personal{unit}", metric.key("personal"), score("personal"), show, sign=sign),
        Column(f"worst 10th{unit}", "worst_decile_personal", worst, show, sign=sign),
        Column("size global", "parameters_global", lambda r: r.summary["parameters"]["global"] or None, _model_size),
        Column("size personal", "parameters_personal", size, _model_size, spread),
        Column("down", "bytes_down", summary("bytes", "down"), format_bytes),
        Column("up", "bytes_up", summary("bytes", "up"), format_bytes),
        Column("GB", "paper_gb", lambda r: r.summary["paper_gb"], _gigabytes),
    ]


def _model_size(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"


def _gigabytes(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the mean and the sample's standard deviation over seeds; a single seed has no deviation."""
    known = [v for v in values if v is not None]
    if not known:
        return None, None
    return fmean(known), stdev(known) if len(known) > 1 else None


class Table(NamedTuple):
    """Titles and cells, as text."""

    titles: list[str]
    rows: list[list[str]]
    labels: int
    """How many columns, from the left, are labels."""

    def column_titled(self, prefix: str) -> str | None:
        """Return the title of the first figure whose title begins so."""
        return next((title for title in self.titles[self.labels :] if title.startswith(prefix)), None)

    def without(self, title: str) -> Table:
        """Return the table less one of its figures."""
        at = self.titles.index(title, self.labels)
        titles, *rows = [row[:at] + row[at + 1 :] for row in (self.titles, *self.rows)]
        return Table(titles, rows, self.labels)


DROPPED_WHEN_NARROW = ("up", "down", "worst 10th %", "size global")
"""Columns that a narrow screen leaves out, in this order."""


def result_table(groups: Sequence[Group], figures: Sequence[Column]) -> Table:
    """Return one row per group; a column tells the number of seeds if the groups differ in it."""
    seeds = ["seeds"] if len({len(one.runs) for one in groups}) > 1 else []
    rows = []
    for one in groups:
        cells = [*one.labels.values(), *(str(len(one.runs)) for _ in seeds)]
        for column in figures:
            mean, deviation = column.figures(one.runs)
            cells.append("–" if mean is None else column.show(mean) + _spread(column.show, mean, deviation))
        rows.append(cells)
    labels = [*groups[0].labels, *seeds]
    return Table(labels + [c.title for c in figures], rows, len(labels))


def _spread(show: Callable[[float], str], mean: float, deviation: float | None) -> str:
    """Return ± a deviation, unless it is less than half of the last digit of the mean as it is written."""
    if not deviation or show(mean + deviation) == show(mean) or deviation < _last_digit(show(mean), mean) / 2:
        return ""
    return f" ± {show(deviation)}"


def _last_digit(text: str, value: float) -> float:
    """Return the weight of the last digit of a written value; 0 if all of its digits are 0."""
    number = re.match(r"-?\d+\.?(\d*)", text)
    return value / float(number[0]) / 10 ** len(number[1]) if number and float(number[0]) else 0.0
