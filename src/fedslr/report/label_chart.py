"""Charts of the labels that clients hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from fedslr.report import svg_axes as svg
from fedslr.report.number_text import plural

LABEL_COLOURS = (
    "#4A3FB5", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB"
)  # fmt: skip
"""Tol's muted colours, for labels; methods have others. His indigo is lighter here, for dark pages."""
MAX_TABLE_LABELS = 20


def label_chart(title: str, counts: np.ndarray, x: svg.Axis, y: svg.Axis) -> Markup:
    """Draw a bar for every row of the counts, with a colour for every column: one path each."""
    tops, labels = counts.cumsum(1), counts.shape[1]
    left = svg.left_margin(y, [0, float(tops.max())])
    # A client stands in the middle of its bar.
    across = svg.Scale([-0.5, len(counts) - 0.5], x, left, svg.WIDTH - svg.RIGHT_MARGIN)
    up = svg.Scale([0, float(tops.max())], y, svg.HEIGHT - svg.BOTTOM_MARGIN, svg.TOP_MARGIN)
    wide = across(1) - across(0)
    gap = min(1.0, wide / 5)
    drawn = []
    for label in range(labels):
        bars = "".join(
            f"M{svg.px(across(i - 0.5) + gap / 2)} {svg.px(up(top))}h{svg.px(wide - gap)}"
            f"V{svg.px(up(top - n))}h{svg.px(gap - wide)}z"
            for i, (n, top) in enumerate(zip(counts[:, label], tops[:, label], strict=True))
            if n
        )
        if bars:
            told = svg.tag("title", f"label {label}: {plural(int(counts[:, label].sum()), 'sample')}")
            drawn.append(svg.tag("path", told, d=bars, class_="bar", fill=label_colour(label, labels)))
    if labels <= len(LABEL_COLOURS):
        drawn += _key(labels)
    return svg.chart(title, svg.HEIGHT, *svg.axes(across, up, x, y, svg.HEIGHT), *drawn, kind="stacked")


def _key(labels: int) -> Sequence[Markup]:
    drawn = []
    for label in range(labels):
        at = svg.WIDTH - svg.RIGHT_MARGIN - 30 * (labels - label)
        drawn.append(svg.tag("rect", x=svg.px(at), y="2", width="10", height="10", fill=label_colour(label, labels)))
        drawn.append(svg.text(at + 13, 11, str(label)))
    return drawn


def label_colour(label: int, labels: int) -> str:
    if labels <= len(LABEL_COLOURS):
        return LABEL_COLOURS[label]
    # Neighbours differ much in hue, and every third is lighter.
    return f"hsl({label * 137.5 % 360:.0f} 55% {(42, 56, 70)[label % 3]}%)"


def label_table(counts: np.ndarray) -> Markup | None:
    """Return the counts as a table, unless there are too many labels."""
    if counts.shape[1] > MAX_TABLE_LABELS:
        return None
    head = [svg.tag("th", "client"), *(svg.tag("th", f"label {n}") for n in range(counts.shape[1]))]
    body = [svg.tag("tr", svg.tag("td", i), *(svg.tag("td", int(n)) for n in row)) for i, row in enumerate(counts)]
    return svg.html_table(head, body)
