"""The sections of a report on accuracy: over rounds and bytes, over clients, over a hyperparameter."""

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

ACCURACY = Axis("accuracy, mean over clients (%)", "{:.4g}".format, bounds=PERCENT_BOUNDS)
LINE_STYLES = "Full lines, full dots: every client with its own model. Dashed lines, hollow dots: the global model."


def accuracy_section(view: View) -> Section:
    """Return the accuracy over rounds and over bytes. Methods that send nothing are a level line over all bytes."""
    by_round, by_bytes, silent = [], [], []
    for one in view.models():
        found = spaced(curves.evaluations(one.group, f"accuracy_{one.model}"), MAX_POINTS)
        several = len(one.group.runs) > 1
        spread = [(100 * min(s.values), 100 * max(s.values)) for s in found] if several else []
        by_round.append(one.line([(s.round, 100 * s.mean) for s in found], spread))
        if found and found[-1].bytes:
            by_bytes.append(one.line([(s.bytes, 100 * s.mean) for s in found], spread))
        elif found:
            silent.append(one.line([(0, 100 * found[-1].mean)])._replace(dashed=True))
    most = max((x for s in by_bytes for x, _ in s.points), default=0)
    if by_bytes:
        by_bytes += [s._replace(name=f"{s.name}: no bytes", points=[*s.points, (most, s.points[0][1])]) for s in silent]
    bytes_caption = "Bytes of all messages, down and up." + seed_bands(by_bytes)
    if silent:
        bytes_caption += " A level line is the last accuracy of a method that sends nothing."
    axis = bytes_axis("sent by then, both ways", most)
    return Section(
        "Accuracy",
        lines_figure(
            "Accuracy over rounds", LINE_STYLES + seed_bands(by_round), by_round, ROUND, ACCURACY, focused=True
        )
        + lines_figure("Accuracy over bytes sent", bytes_caption, by_bytes, axis, ACCURACY, focused=True),
        certainty_table(view) + convergence_table(view),
    )


def bytes_axis(label: str, largest: float) -> Axis:
    """Return an axis of bytes in the unit of the largest value."""
    power = min(4, max(0, int(math.log10(largest) // 3))) if largest >= 1 else 0
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return Axis(f"{label} ({unit})", lambda v: f"{v / 1000**power:.4g}", low=0)


def client_section(view: View) -> Section:
    """Return the distribution of accuracy over clients, absolute and relative to FedAvg."""
    base, absolute, relative = curves.baselines(view.runs), [], []
    for one in view.models():
        absolute.append(one.violin([curves.by_client(r, f"accuracy_{one.model}_per_client") for r in one.group.runs]))
        if not curves.is_baseline(one.group):
            relative.append(one.violin([curves.relative(r, base, one.model) for r in one.group.runs]))
    caption = "Right of the red line clients are better off than with FedAvg, left of it worse. "
    others = [group for group in view.groups if not curves.is_baseline(group)]
    alone = [g.name for g in others if not all(curves.setting(run) in base for run in g.runs)]
    if alone:
        caption += f"Left out, for want of a run of FedAvg with the same data, settings and seed: {', '.join(alone)}. "
    gain = Axis("accuracy less FedAvg's, percentage points", lambda v: f"{v:+.3g}" if v else "0", low=0, high=0)
    per_cent = Axis("accuracy (%)", "{:.3g}".format, bounds=PERCENT_BOUNDS)
    return Section(
        "Over clients",
        violins_figure("Accuracy of every client", "", absolute, per_cent)
        + violins_figure("Accuracy relative to FedAvg", caption, relative, gain, "as good as FedAvg"),
        client_table(view),
    )


def sensitivity_section(view: View) -> Section:
    """Return the final accuracy over the values of a swept hyperparameter."""
    found = curves.find_sweep(view.groups)
    if found is None:
        return Section("Sensitivity", [])
    series = []
    for i, (name, look) in enumerate(zip(found.lines, looks(list(found.lines)), strict=True)):
        for model in ("personal", "global"):
            last = curves.final_accuracies(found.lines[name], model)
            spread = [(min(v), max(v)) for _, v in last] if any(len(values) > 1 for _, values in last) else []
            points = [(x, fmean(v)) for x, v in last]
            # The legend must not hide these lines, because they go through all groups.
            series.append(
                Series(f"{name}, {model}" if name else model, -1 - i, look, points, model == "global", spread)
            )
    values = [x for s in series for x, _ in s.points]
    axis = Axis(found.key, "{:g}".format, log=bool(values) and curves.spans_decades(values))
    caption = f"Accuracy at the end for every value. {LINE_STYLES}{seed_bands(series)}"
    return Section("Sensitivity", lines_figure(f"Accuracy over {found.key}", caption, series, axis, ACCURACY))
