"""Charts of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedslr.report import svg_axes as svg
from fedslr.report.colours import Look

MAX_DETAILED_LINES = 8
"""A chart of more lines has no bands and fewer dots, because they would hide each other."""
MAX_MARKED_POINTS = 25
"""A line of more points has a marker at its end only."""
MAX_TABLE_ROWS = 40
SAMPLE_WIDTH = 26
"""Width of a line in a key, with the gap before its name."""
KEY_GAP = 12
KEY_ROW = 16

Point = tuple[float, float]


class Series(NamedTuple):
    """One line of a chart."""

    name: str
    group: int
    """A legend hides all lines of a group together."""
    look: Look
    points: Sequence[Point]
    dashed: bool = False
    spread: Sequence[Point] = ()
    """The lowest and the highest value at every point, if there are several."""


def line_chart(title: str, series: Sequence[Series], x: svg.Axis, y: svg.Axis, key: bool = False) -> Markup:
    """Draw one line per series over common axes; with a key if no legend of the page names the lines."""
    values = [v for s in series for _, v in s.points] + [v for s in series for pair in s.spread for v in pair]
    named, more = _key(series, y.label) if key else ([], 0.0)
    top, height = svg.TOP_MARGIN + more, svg.HEIGHT + more
    across = svg.Scale(
        [v for s in series for v, _ in s.points], x, svg.left_margin(y, values), svg.WIDTH - svg.RIGHT_MARGIN
    )
    up = svg.Scale(values, y, height - svg.BOTTOM_MARGIN, top)
    detailed = len(series) <= MAX_DETAILED_LINES
    drawn = [_line(s if detailed else s._replace(spread=()), across, up, x, y, detailed) for s in series]
    # The last one drawn is on top, and the first series is the subject of a page.
    inside = [*svg.axes(across, up, x, y, height), *reversed(drawn), *named]
    return svg.chart(title, height, *inside, kind="lines", tabindex="0", data_top=svg.px(top))


def has_bands(series: Sequence[Series]) -> bool:
    """Return whether `line_chart` draws the spread of any series; a band needs two points."""
    return len(series) <= MAX_DETAILED_LINES and any(s.spread and len(s.points) > 1 for s in series)


def _key(series: Sequence[Series], label: str) -> tuple[list[Markup], float]:
    """Draw a key right of the axis' label, or in rows below it if it does not fit; return it and the rows' height."""
    most = int((svg.WIDTH - SAMPLE_WIDTH) / svg.WIDE_LETTER_WIDTH)
    widths = [SAMPLE_WIDTH + svg.WIDE_LETTER_WIDTH * min(len(s.name), most) for s in series]
    at, y = svg.WIDTH - sum(widths) - KEY_GAP * (len(series) - 1), 11.0
    fits = at >= svg.WIDE_LETTER_WIDTH * len(label) + KEY_GAP
    drawn = []
    for n, (s, wide) in enumerate(zip(series, widths, strict=True)):
        if not fits and (n == 0 or at + wide > svg.WIDTH):
            at, y = 0.0, y + KEY_ROW
        line = svg.tag("path", d=f"M{svg.px(at)} {svg.px(y - 4)}h20", class_="sample dashed" if s.dashed else "sample")
        drawn.append(svg.tag("g", line, _marker(at + 10, y - 4, s), class_=svg.colour_class(s.look)))
        drawn.append(svg.tag("text", svg.shortened(s.name, most), x=svg.px(at + SAMPLE_WIDTH), y=svg.px(y)))
        at += wide + KEY_GAP
    return drawn, y - 11


def _line(s: Series, across: svg.Scale, up: svg.Scale, x: svg.Axis, y: svg.Axis, detailed: bool) -> Markup:
    places = [(across(a), up(b)) for a, b in s.points]
    parts = []
    if s.spread:
        edge = [(a, up(high)) for (a, _), (_, high) in zip(places, s.spread, strict=True)]
        back = [(a, up(low)) for (a, _), (low, _) in zip(places, s.spread, strict=True)][::-1]
        parts.append(svg.tag("path", d=_route(edge + back) + "Z", class_="spread"))
    shown = [(x.show(a), y.show(b)) for a, b in s.points]
    told = {"data_name": s.name, "data_x": "|".join(a for a, _ in shown), "data_y": "|".join(b for _, b in shown)}
    parts.append(svg.tag("path", d=_route(places), class_="line dashed" if s.dashed else "line", **told))
    every = 1 if detailed and len(places) <= MAX_MARKED_POINTS else len(places)
    every = max(1, len(places) // 4) if every > 1 and s.look.again else every
    for i in range(len(places) - 1, -1, -every):
        a, b = shown[i]
        parts.append(_marker(*places[i], s, svg.tag("title", f"{s.name}: {b} ({x.label} {a})")))
    return svg.tag("g", *parts, class_=f"{svg.colour_class(s.look)} g{s.group}")


def _route(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{svg.px(a)} {svg.px(b)}" for a, b in places)


def _marker(x: float, y: float, s: Series, title: str = "") -> Markup:
    """Draw a disc, hollow on a dashed line; a square or a diamond if another line has the same colour."""
    again, kind = s.look.again, "dot hollow" if s.dashed else "dot"
    if not again:
        return svg.tag("circle", title, cx=svg.px(x), cy=svg.px(y), r="2.6", class_=kind)
    turn = f"rotate({45 * (again - 1)} {svg.px(x)} {svg.px(y)})" if again > 1 else None
    return svg.tag("rect", title, x=svg.px(x - 3), y=svg.px(y - 3), width="6", height="6", transform=turn, class_=kind)


def values_table(series: Sequence[Series], x: svg.Axis, y: svg.Axis) -> Markup:
    """Return the numbers of a chart, for people who read or hear them."""
    by_x: dict[float, dict[int, str]] = {}
    for i, s in enumerate(series):
        for a, b in s.points:
            by_x.setdefault(a, {})[i] = y.show(b)
    head = [svg.tag("th", x.label), *(svg.tag("th", s.name, class_=f"g{s.group}") for s in series)]
    body = []
    for a in svg.spaced(sorted(by_x), MAX_TABLE_ROWS):
        cells = [svg.tag("td", by_x[a].get(i, "–"), class_=f"g{s.group}") for i, s in enumerate(series)]
        body.append(svg.tag("tr", svg.tag("td", x.show(a)), *cells))
    return svg.html_table(head, body, y.label)
