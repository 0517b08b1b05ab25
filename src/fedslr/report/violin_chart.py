"""Charts of the distribution of one number over clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fedslr.report import svg_axes as svg
from fedslr.report.colours import Look
from fedslr.report.number_text import plural
from fedslr.report.svg_axes import px, tag

MAX_LINE_LETTERS = 28
"""Letters in a line of a broken name."""
ROW_HEIGHT = 34
TOP = 4


class Violin(NamedTuple):
    """The values of one number over clients."""

    name: str
    group: int
    look: Look
    values: Sequence[float]
    clients: Sequence[str]
    """The names of the clients, one per value."""
    hollow: bool = False


def violin_chart(
    title: str, rows: Sequence[Violin], axis: svg.Axis, zero: str | None = None, dots: bool = True
) -> Markup:
    """Draw a row per violin: its width is the density of clients, the bar their middle half, the dot the median."""
    letters = min(MAX_LINE_LETTERS, max(len(line) for r in rows for line in in_two(r.name)))
    values = [v for r in rows for v in r.values]
    across = svg.Scale(values, axis, 8 + svg.WIDE_LETTER_WIDTH * letters, svg.WIDTH - svg.RIGHT_MARGIN)
    bottom = ROW_HEIGHT * len(rows) + TOP
    height = bottom + svg.BOTTOM_MARGIN
    drawn = [svg.axis_label(across, axis, height)]
    for value in across.ticks():
        drawn.append(tag("path", d=f"M{px(across(value))} {TOP}V{bottom}", class_="grid"))
        drawn.append(svg.text(across(value), bottom + 17, axis.show(value), "middle"))
    if zero is not None:
        drawn.append(tag("path", tag("title", zero), d=f"M{px(across(0))} {TOP}V{bottom}", class_="zero"))
    for i, row in enumerate(rows):
        drawn.append(_violin(row, across, TOP + ROW_HEIGHT * (i + 0.5), axis, letters, dots))
    return svg.chart(title, height, *drawn, kind="violins")


def in_two(name: str) -> list[str]:
    """Return a name as one line, or as two of similar length if it is too long for one."""
    parts = name.split(", ")
    if len(name) <= svg.MAX_NAME_LETTERS or len(parts) == 1:
        return [name]
    halves = [(", ".join(parts[:n]) + ",", ", ".join(parts[n:])) for n in range(1, len(parts))]
    return list(min(halves, key=lambda pair: max(map(len, pair))))


def _row_name(name: str, x: float, y: float, letters: int) -> list[Markup]:
    lines = in_two(name)
    first = y - 6.5 * (len(lines) - 1)
    return [
        tag("text", svg.shortened(line, letters), x=px(x), y=px(first + 13 * n), text_anchor="end")
        for n, line in enumerate(lines)
    ]


def density(values: Sequence[float], at: np.ndarray) -> np.ndarray:
    """Return a Gaussian kernel density with Silverman's width, scaled so that its largest value is 1."""
    x = np.asarray(values, float)
    spread = float(x.std()) or (float(at[-1] - at[0]) or 1.0) / 50
    width = 0.9 * spread * len(x) ** -0.2
    heights = np.exp(-0.5 * ((at[:, None] - x[None]) / width) ** 2).sum(1)
    found: np.ndarray = heights / heights.max()
    return found


def quantiles(values: Sequence[float]) -> list[float]:
    found: list[float] = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return found


def _violin(row: Violin, across: svg.Scale, middle: float, axis: svg.Axis, letters: int, dots: bool) -> Markup:
    low, q1, median, q3, high = quantiles(row.values)
    told = f"{row.name}: median {axis.show(median)}, middle half {axis.show(q1)} to {axis.show(q3)}"
    told += f", from {axis.show(low)} to {axis.show(high)}, {plural(len(row.values), 'client')}"
    parts = _row_name(row.name, across.start - 8, middle + 4, letters)
    if high > low:
        at = np.linspace(low, high, 48)
        wide = density(row.values, at) * (ROW_HEIGHT / 2 - 3)
        outline = [*zip(at, middle - wide, strict=True), *zip(at[::-1], middle + wide[::-1], strict=True)]
        shape = "M" + "L".join(f"{px(across(v))} {px(y)}" for v, y in outline) + "Z"
        parts.append(tag("path", tag("title", told), d=shape, class_="violin hollow" if row.hollow else "violin"))
    for i, (value, client) in enumerate(zip(row.values, row.clients, strict=True) if dots else ()):
        # Spread evenly and reproducibly, so that clients of equal accuracy do not hide each other.
        y = middle + (i * 0.618 % 1 - 0.5) * (ROW_HEIGHT / 2 - 6)
        title = tag("title", f"{row.name}, {client}: {axis.show(value)}")
        parts.append(tag("circle", title, cx=px(across(value)), cy=px(y), r="1.7", class_="client"))
    parts.append(tag("path", d=f"M{px(across(q1))} {px(middle)}H{px(across(q3))}", class_="half"))
    parts.append(tag("circle", tag("title", told), cx=px(across(median)), cy=px(middle), r="4", class_="median"))
    return tag("g", *parts, class_=f"{svg.colour_class(row.look)} g{row.group}")


def quartiles_table(rows: Sequence[Violin]) -> Markup:
    """Return the quartiles of every violin."""
    head = [tag("th", t) for t in ("", "lowest", "lower quarter", "median", "upper quarter", "highest")]
    body = []
    for row in rows:
        cells = [tag("td", row.name), *(tag("td", f"{v:.1f}") for v in quantiles(row.values))]
        body.append(tag("tr", *cells, class_=f"g{row.group}"))
    return svg.html_table(head, body)
