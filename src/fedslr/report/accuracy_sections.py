"""The sections of a report on accuracy: over rounds and bytes, over clients, over a hyperparameter."""

from __future__ import annotations

import math
from statistics import fmean

from fedslr.report import curves
from fedslr.report.colours import looks
from fedslr.report.hyperparameter_sweeps import final_accuracies, find_sweep, spans_decades
from fedslr.report.line_chart import Series
from fedslr.report.report_view import (
    MAX_POINTS,
    PERCENT_BOUNDS,
    ROUND,
    VIOLIN_SHAPE,
    Section,
    View,
    lines_figure,
    seed_bands,
    violins_figure,
)
from fedslr.report.svg_axes import Axis, spaced

ACCURACY = Axis("accuracy, mean over clients (%)", "{:.4g}".format, bounds=PERCENT_BOUNDS)


def accuracy_section(view: View) -> Section:
    by_round, by_bytes, sent = [], [], 0.0
    for one in view.models():
        found = spaced(curves.evaluations(one.group, f"accuracy_{one.model}"), MAX_POINTS)
        several = len(one.group.runs) > 1
        spread = [(100 * min(s.values), 100 * max(s.values)) for s in found] if several else []
        by_round.append(one.line([(s.round, 100 * s.mean) for s in found], spread))
        if found and found[-1].bytes:
            sent = max(sent, found[-1].bytes)
            by_bytes.append(one.line([(s.bytes, 100 * s.mean) for s in found]))
    styles = "Full lines, full dots: every client with its own model. Dashed lines, hollow dots: all with the global "
    styles += "model." + seed_bands(by_round)
    both, exact = "Bytes of all messages, down and up.", bytes_axis("sent by then, both ways", sent)
    return Section(
        "Accuracy",
        view.lines("Accuracy over rounds", styles, by_round, ROUND, ACCURACY)
        + view.lines("Accuracy over bytes sent", both, by_bytes, exact, ACCURACY),
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
    caption = "Right of the red line clients are better off than with FedAvg, left of it worse. " + VIOLIN_SHAPE
    others = [group for group in view.groups if not curves.is_baseline(group)]
    alone = [g.name for g in others if not all(curves.has_baseline(run, base) for run in g.runs)]
    if alone:
        caption += f" Left out, for want of a run of FedAvg with the same data, settings and seed: {', '.join(alone)}."
    gain = Axis("accuracy less FedAvg's, percentage points", lambda v: f"{v:+.3g}" if v else "0", low=0, high=0)
    per_cent = Axis("accuracy (%)", "{:.3g}".format, bounds=PERCENT_BOUNDS)
    return Section(
        "Over clients",
        violins_figure("Accuracy of every client", VIOLIN_SHAPE, absolute, per_cent)
        + violins_figure("Accuracy relative to FedAvg", caption, relative, gain, "as good as FedAvg"),
    )


def sensitivity_section(view: View) -> Section:
    """Return the final accuracy over the values of a swept hyperparameter."""
    found = find_sweep(view.groups)
    if found is None:
        return Section("Sensitivity", [])
    series = []
    for i, (name, look) in enumerate(zip(found.lines, looks(list(found.lines)), strict=True)):
        for model in ("personal", "global"):
            last = final_accuracies(found.lines[name], model)
            several = any(len(values) > 1 for _, values in last)
            spread = [(100 * min(v), 100 * max(v)) for _, v in last] if several else []
            points = [(x, 100 * fmean(v)) for x, v in last]
            # The legend must not hide these lines, because they go through all groups.
            label = f"{name}, {model}" if name else model
            series.append(Series(label, -1 - i, look, points, model == "global", spread))
    values = [x for s in series for x, _ in s.points]
    if not values:
        return Section("Sensitivity", [])
    axis = Axis(found.key, "{:g}".format, log=spans_decades(values))
    caption = "Accuracy at the end for every value. Full lines, full dots: personal models. Dashed lines, hollow dots: "
    caption += "the global model." + seed_bands(series)
    return Section("Sensitivity", lines_figure(f"Accuracy over {found.key}", caption, series, axis, ACCURACY))
