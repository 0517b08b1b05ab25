"""The subject of a report: groups of runs with their colours, and the parts that its sections consist of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedslr.report import curves
from fedslr.report.colours import Look, looks
from fedslr.report.line_chart import Point, Series, has_bands, line_chart, values_table
from fedslr.report.result_tables import columns
from fedslr.report.run_groups import Group
from fedslr.report.saved_runs import Run
from fedslr.report.svg_axes import Axis
from fedslr.report.violin_chart import Violin, quartiles_table, violin_chart
from fedslr.storage.statistics import Headline

MAX_DOTS = 2500
"""A chart of more clients does not draw each of them."""
MAX_POINTS = 240
"""Points of a line."""
VIOLIN_SHAPE = "Wide parts hold many clients. Bar: the middle half of the clients; large dot: the median"
ROUND = Axis("communication round", "{:.0f}".format, whole=True)
PERCENT_BOUNDS = (0.0, 100.0)
SPARSE_METHODS = {"fedslr", "fedslr-budget", "lpgd", "gpgd", "sparse-sparse"}
"""Methods whose clients keep a sparse part beside the global model."""


class Figure(NamedTuple):
    """A chart, its caption, and its numbers as a table."""

    title: str
    caption: str
    chart: Markup
    values: Markup | None = None


class Section(NamedTuple):
    """A part of the page: first its tables, each under a title and over a caption, then its figures."""

    title: str
    figures: Sequence[Figure]
    tables: Sequence[Figure] = ()


class ModelView(NamedTuple):
    """One model of one group of runs, and how it is drawn."""

    name: str
    place: int
    """The place of the group among others."""
    group: Group
    look: Look
    model: str

    @property
    def metric(self) -> Headline:
        """The headline metric."""
        return self.group.runs[0].metric

    def line(self, points: Sequence[Point], spread: Sequence[Point] = ()) -> Series:
        return Series(self.name, self.place, self.look, points, self.model == "global", spread)

    def violin(self, found: Sequence[dict[int, float]]) -> Violin:
        """Return the values that the clients of every run have, shares in per cent."""
        pairs = []
        for run, each in zip(self.group.runs, found, strict=True):
            seed = f", seed {run.config.get('seed')}" if len(self.group.runs) > 1 else ""
            pairs += [(f"client {client}{seed}", self.metric.factor * value) for client, value in each.items()]
        values, clients = [v for _, v in pairs], [client for client, _ in pairs]
        return Violin(self.name, self.place, self.look, values, clients, self.model == "global")


class View:
    """Groups of runs, each with its look; `pick` and `clients` choose the accuracies of its tables as in `columns`."""

    def __init__(
        self, runs: Sequence[Run], pick: str = "last", clients: str = "all", groups: Sequence[Group] | None = None
    ) -> None:
        self.runs, self.pick, self.clients = list(runs), pick, clients
        self.metric = self.runs[0].metric
        """The headline metric, of the first run."""
        self.columns = {column.key: column for column in columns(pick, clients, self.metric)}
        self.groups = curves.ranked_groups(runs) if groups is None else list(groups)
        self.looks = looks([g.name for g in self.groups])
        self.several = len(self.groups) > 1

    def numbered(self) -> list[tuple[int, Group, Look]]:
        return [(i, g, look) for i, (g, look) in enumerate(zip(self.groups, self.looks, strict=True))]

    def series_name(self, group: Group, part: str) -> str:
        """Return the name of a line: the group's, if there are others, and the part of it that the line shows."""
        return f"{group.name}, {part}" if self.several and part else part or group.name

    def models(self) -> list[ModelView]:
        """Return every model of every group."""
        found = []
        for i, group, look in self.numbered():
            models = curves.models(group)
            for model in models:
                name = self.series_name(group, "" if self.several and len(models) == 1 else model)
                found.append(ModelView(name, i, group, look, model))
        return found

    def one_seed(self) -> str:
        """Return a caption's sentence if a chart shows only the first run of each group."""
        most = max(len(g.runs) for g in self.groups)
        return "" if most == 1 else " One seed of each." if self.several else f" One of {most} seeds."


def lines_figure(
    title: str, caption: str, series: Sequence[Series], x: Axis, y: Axis, focused: bool = False
) -> list[Figure]:
    """Return a chart of lines with its numbers; nothing if no line has points.

    The upward axis of a `focused` chart shows the ends of its lines well, even if they begin far below.
    """
    there = [s for s in series if s.points]
    if not there:
        return []
    low = curves.late_minimum([s.points for s in there]) if focused else None
    if low is not None:
        caption += f" The axis begins at {y.show(low)}, because lower, earlier values would flatten the ends."
    return [Figure(title, caption, line_chart(title, there, x, y, low), values_table(there, x, y))]


def seed_bands(series: Sequence[Series]) -> str:
    """Return a caption's sentence on bands, if there are any."""
    return " Bands: lowest and highest seed." if has_bands([s for s in series if s.points]) else ""


def violins_figure(
    title: str, caption: str, rows: Sequence[Violin], axis: Axis, zero: str | None = None
) -> list[Figure]:
    """Return a chart of violins with their quartiles; nothing if no row has values."""
    there = [r for r in rows if r.values]
    if not there:
        return []
    dots = sum(len(r.values) for r in there) <= MAX_DOTS
    caption += VIOLIN_SHAPE + ("; small dots: clients." if dots else ".")
    return [Figure(title, caption, violin_chart(title, there, axis, zero, dots), quartiles_table(there))]
