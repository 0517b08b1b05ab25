"""The section of a report on the labels that clients hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import Markup

from fedslr.report import svg_axes as svg
from fedslr.report.label_skew import extremes, saved_label_counts, skew
from fedslr.report.number_text import percent, plural
from fedslr.report.report_view import Figure, Section, View
from fedslr.report.saved_runs import Run
from fedslr.report.svg_axes import px, tag

MAX_DRAWN_CLIENTS = 200
LABEL_COLOURS = (
    "#4A3FB5", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB"
)  # fmt: skip
"""Tol's muted colours, for labels; methods have others. His indigo is lighter here, for dark pages."""
MAX_TABLE_LABELS = 20
CLIENT = svg.Axis("client", "{:.0f}".format, whole=True)
SAMPLES = svg.Axis("samples", "{:.4g}".format, low=0)


def label_section(view: View) -> Section:
    drawn = (run for group in view.groups for run in group.runs)
    found = [(run, counts) for run in drawn if (counts := saved_label_counts(run)) is not None and counts.shape[1] > 1]
    if not found:
        return Section("Data", [])
    counts = found[0][1]
    shown, figures = counts[:MAX_DRAWN_CLIENTS], skew(counts)
    caption = f"Training samples of every client, one colour for each of {counts.shape[1]} labels. "
    caption += _which_split(view, found)
    if len(counts) > len(shown):
        caption += f"The first {MAX_DRAWN_CLIENTS} clients. "
    caption += f"On average a client holds {figures['labels_held']:.1f} labels, its most frequent label has "
    caption += f"{percent(figures['largest_share'])} of its samples, and its label shares are "
    caption += f"{percent(figures['distance'])} away from those of all clients (total variation); {extremes(counts)}."
    title = "Labels of every client"
    return Section("Data", [Figure(title, caption, label_chart(title, shown), _label_table(shown))])


def _which_split(view: View, found: list[tuple[Run, np.ndarray]]) -> str:
    """Return which of several splits the first one is: a seed's, or also a group's if its seed has several."""
    run, counts = found[0]
    others = [other for other, theirs in found if not np.array_equal(theirs, counts)]
    if not others:
        return ""
    group = next(g for g in view.groups if any(r is run for r in g.runs))
    named = [group.name] if any(_split_seed(run) == _split_seed(other) for other in others) else []
    named += [f"seed {_split_seed(run)}"] if len({_split_seed(r) for r, _ in found}) > 1 else []
    return f"This is the split of {', '.join(named)}; others differ. "


def _split_seed(run: Run) -> Any:
    return run.config.get("data.seed", run.config.get("seed"))


def label_chart(title: str, counts: np.ndarray) -> Markup:
    """Draw a bar for every row of the counts, with a colour for every column: one path each."""
    tops, labels = counts.cumsum(1), counts.shape[1]
    left = svg.left_margin(SAMPLES, [0, float(tops.max())])
    # A client stands in the middle of its bar.
    across = svg.Scale([-0.5, len(counts) - 0.5], CLIENT, left, svg.WIDTH - svg.RIGHT_MARGIN)
    up = svg.Scale([0, float(tops.max())], SAMPLES, svg.HEIGHT - svg.BOTTOM_MARGIN, svg.TOP_MARGIN)
    wide = across(1) - across(0)
    gap = min(1.0, wide / 5)
    drawn = []
    for label in range(labels):
        bars = "".join(
            f"M{px(across(i - 0.5) + gap / 2)} {px(up(top))}h{px(wide - gap)}V{px(up(top - n))}h{px(gap - wide)}z"
            for i, (n, top) in enumerate(zip(counts[:, label], tops[:, label], strict=True))
            if n
        )
        told = tag("title", f"label {label}: {plural(int(counts[:, label].sum()), 'sample')}")
        drawn += [tag("path", told, d=bars, class_="bar", fill=_label_colour(label, labels))] if bars else []
        if labels <= len(LABEL_COLOURS):
            at = svg.WIDTH - svg.RIGHT_MARGIN - 30 * (labels - label)
            drawn.append(tag("rect", x=at, y=2, width=10, height=10, fill=_label_colour(label, labels)))
            drawn.append(svg.text(at + 13, 11, str(label)))
    return svg.chart(title, svg.HEIGHT, *svg.axes(across, up, CLIENT, SAMPLES, svg.HEIGHT), *drawn, kind="stacked")


def _label_colour(label: int, labels: int) -> str:
    if labels <= len(LABEL_COLOURS):
        return LABEL_COLOURS[label]
    # Neighbours differ much in hue, and every third is lighter.
    return f"hsl({label * 137.5 % 360:.0f} 55% {(42, 56, 70)[label % 3]}%)"


def _label_table(counts: np.ndarray) -> Markup | None:
    """Return the counts as a table, unless there are too many labels."""
    if counts.shape[1] > MAX_TABLE_LABELS:
        return None
    head = [tag("th", "client"), *(tag("th", f"label {n}") for n in range(counts.shape[1]))]
    return svg.html_table(head, [tag("tr", *(tag("td", n) for n in (i, *row))) for i, row in enumerate(counts)])
