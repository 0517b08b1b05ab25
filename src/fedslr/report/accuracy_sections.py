"""The sections of a report on the headline metric: over rounds and bytes, over clients, over a hyperparameter."""

from __future__ import annotations

import math
from statistics import fmean

from fedslr.report import curves
from fedslr.report.answer_tables import certainty_table, client_table, convergence_table
from fedslr.report.colours import looks
from fedslr.report.line_chart import Series
from fedslr.report.report_view import (
    MAX_POINTS,
    PERCENT_BOUNDS,
    ROUND,
    Section,
    View,
    lines_figure,
    seed_bands,
    violins_figure,
)
from fedslr.report.svg_axes import Axis, spaced
from fedslr.storage.statistics import Headline

LINE_STYLES = "Full lines, full dots: every client with its own model. Dashed lines, hollow dots: the global model."


def score_axis(metric: Headline, label: str = ", mean over clients") -> Axis:
    """Return the axis of a metric."""
    if metric.is_share:
        return Axis(f"{metric.words}{label} (%)", "{:.4g}".format, bounds=PERCENT_BOUNDS)
    return Axis(f"{metric.words}{label}", "{:.4g}".format)


def _title(metric: Headline, rest: str) -> str:
    words = metric.words
    return f"{words[0].upper()}{words[1:]} {rest}"


def accuracy_section(view: View) -> Section:
    """Return the headline metric over rounds and over bytes. A method that sends nothing is a level line there."""
    by_round, by_bytes, silent = [], [], []
    for one in view.models():
        found = spaced(curves.evaluations(one.group, one.metric.key(one.model)), MAX_POINTS)
        several, factor = len(one.group.runs) > 1, one.metric.factor
        spread = [(factor * min(s.values), factor * max(s.values)) for s in found] if several else []
        by_round.append(one.line([(s.round, factor * s.mean) for s in found], spread))
        if found and found[-1].bytes:
            by_bytes.append(one.line([(s.bytes, factor * s.mean) for s in found], spread))
        elif found:
            silent.append(one.line([(0, factor * found[-1].mean)])._replace(dashed=True))
    most = max((x for s in by_bytes for x, _ in s.points), default=0)
    if by_bytes:
        by_bytes += [s._replace(name=f"{s.name}: no bytes", points=[*s.points, (most, s.points[0][1])]) for s in silent]
    bytes_caption = "Bytes of all messages, down and up." + seed_bands(by_bytes)
    if silent:
        bytes_caption += " A level line is the last value of a method that sends nothing."
    axis, scale, focused = bytes_axis("sent by then, both ways", most), score_axis(view.metric), view.metric.is_share
    over_rounds, over_bytes = (_title(view.metric, f"over {what}") for what in ("rounds", "bytes sent"))
    return Section(
        _title(view.metric, "").strip(),
        lines_figure(over_rounds, LINE_STYLES + seed_bands(by_round), by_round, ROUND, scale, focused)
        + lines_figure(over_bytes, bytes_caption, by_bytes, axis, scale, focused),
        certainty_table(view) + convergence_table(view),
    )


def bytes_axis(label: str, largest: float) -> Axis:
    """Return an axis of bytes in the unit of the largest value."""
    power = min(4, max(0, int(math.log10(largest) // 3))) if largest >= 1 else 0
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return Axis(f"{label} ({unit})", lambda v: f"{v / 1000**power:.4g}", low=0)


def client_section(view: View) -> Section:
    """Return the distribution of the headline metric over clients, absolute and relative to FedAvg."""
    base, absolute, relative = curves.baselines(view.runs), [], []
    metric, better = view.metric, "Right" if view.metric.larger_is_better else "Left"
    worse, points = "left" if better == "Right" else "right", "percentage points" if metric.is_share else "difference"
    for one in view.models():
        absolute.append(
            one.violin([curves.by_client(r, metric.key(one.model, per_client=True)) for r in one.group.runs])
        )
        if not curves.is_baseline(one.group):
            relative.append(one.violin([curves.relative(r, base, one.model) for r in one.group.runs]))
    caption = f"{better} of the red line clients are better off than with FedAvg, {worse} of it worse. "
    others = [group for group in view.groups if not curves.is_baseline(group)]
    alone = [g.name for g in others if not all(curves.setting(run) in base for run in g.runs)]
    if alone:
        caption += f"Left out, for want of a run of FedAvg with the same data, settings and seed: {', '.join(alone)}. "
    gain = Axis(f"{metric.words} less FedAvg's, {points}", lambda v: f"{v:+.3g}" if v else "0", low=0, high=0)
    per_cent = score_axis(metric, "")
    return Section(
        "Over clients",
        violins_figure(_title(metric, "of every client"), "", absolute, per_cent)
        + violins_figure(_title(metric, "relative to FedAvg"), caption, relative, gain, "as good as FedAvg"),
        client_table(view),
    )


def sensitivity_section(view: View) -> Section:
    """Return the final value of the headline metric over the values of a swept hyperparameter."""
    found = curves.find_sweep(view.groups)
    if found is None:
        return Section("Sensitivity", [])
    series = []
    for i, (name, look) in enumerate(zip(found.lines, looks(list(found.lines)), strict=True)):
        for model in ("personal", "global"):
            last = curves.final_scores(found.lines[name], model)
            spread = [(min(v), max(v)) for _, v in last] if any(len(values) > 1 for _, values in last) else []
            points = [(x, fmean(v)) for x, v in last]
            # The legend must not hide these lines, because they go through all groups.
            series.append(
                Series(f"{name}, {model}" if name else model, -1 - i, look, points, model == "global", spread)
            )
    values = [x for s in series for x, _ in s.points]
    axis = Axis(found.key, "{:g}".format, log=bool(values) and curves.spans_decades(values))
    caption = f"{_title(view.metric, 'at the end')} for every value. {LINE_STYLES}{seed_bands(series)}"
    title = _title(view.metric, f"over {found.key}")
    return Section("Sensitivity", lines_figure(title, caption, series, axis, score_axis(view.metric)))
