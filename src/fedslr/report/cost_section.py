"""The section of a report on the cost of training: bytes, seconds and parameters."""

from __future__ import annotations

from statistics import median

from fedslr.report.accuracy_sections import bytes_axis
from fedslr.report.answer_tables import cost_table
from fedslr.report.colours import Look
from fedslr.report.curves import MAX_BINS, binned
from fedslr.report.line_chart import Series
from fedslr.report.report_view import ROUND, Figure, Section, View, lines_figure
from fedslr.report.svg_axes import Axis


def cost_section(view: View) -> Section:
    long = any(len(g.runs[0].records) > MAX_BINS for g in view.groups)
    note = view.one_seed() + (" Means of neighbouring rounds." if long else "")
    return Section("Cost", [*_bytes(view, note), *_seconds(view, note)], cost_table(view))


def _bytes(view: View, note: str) -> list[Figure]:
    series = []
    for i, group, look in view.numbered():
        for way in ("down", "up"):
            points = binned([(r["round"], r[f"bytes_{way}"]) for r in group.runs[0].records])
            if any(size for _, size in points):
                series.append(Series(view.series_name(group, way), i, look, points, way == "up"))
    axis = bytes_axis("bytes of a round", max([y for s in series for _, y in s.points], default=0))
    caption = f"Messages to all sampled clients (full lines) and from them (dashed, hollow dots).{note}"
    return lines_figure("Bytes per round", caption, series, ROUND, axis)


def _seconds(view: View, note: str) -> list[Figure]:
    """Draw the whole time of a round; by phase if there is one group only."""
    series = []
    for i, group, look in view.numbered():
        records = group.runs[0].records
        phases = {"": look} if view.several else {"all": look, "train": Look(1), "aggregate": Look(2)}
        for name, painted in phases.items():
            whole = name in ("", "all")
            spent = [(r["round"], r["seconds"] if whole else r["seconds_by"].get(name)) for r in records]
            points = binned([(n, seconds) for n, seconds in spent if seconds])
            series.append(Series(view.series_name(group, name), i, painted, points))
    steady = [y for s in series for _, y in s.points]
    # The first round of a compiled engine takes long; it must not flatten the others.
    log = bool(steady) and max(steady) > 8 * median(steady)
    axis = Axis("seconds", "{:.3g}".format, log=log, low=None if log else 0)
    return lines_figure("Seconds per round", f"Measured time of a round, checkpoints aside.{note}", series, ROUND, axis)
