"""Charts of lines, each named at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedslr.report import svg_axes as svg
from fedslr.report.colours import Look
from fedslr.report.svg_axes import px, tag

MAX_DETAILED_LINES = 12
"""A chart of more lines has no bands, no names and fewer dots, because they would hide each other."""
MAX_MARKED_POINTS = 25
"""A line of more points has a marker at its end only."""
MAX_TABLE_ROWS = 40
MAX_LABEL_LETTERS = 20
LABEL_HEIGHT = 13.0
LABEL_GAP = 12
"""Space between the end of the lines and their names."""

Point = tuple[float, float]


class Series(NamedTuple):
    """One line of a chart."""

    name: str
    group: int
    """The legend of the page hides all lines of a group together."""
    look: Look
    points: Sequence[Point]
    dashed: bool = False
    spread: Sequence[Point] = ()
    """The lowest and the highest value at every point, if there are several."""


def line_chart(title: str, series: Sequence[Series], x: svg.Axis, y: svg.Axis, low: float | None = None) -> Markup:
    """Draw one line per series over common axes; `low` cuts off everything below a value."""
    detailed = len(series) <= MAX_DETAILED_LINES
    named = detailed and len(series) > 1
    letters = min(MAX_LABEL_LETTERS, max(len(s.name) for s in series))
    right = svg.WIDTH - (LABEL_GAP + svg.WIDE_LETTER_WIDTH * letters if named else svg.RIGHT_MARGIN)
    values = [v for s in series for _, v in s.points] + [v for s in series for pair in s.spread for v in pair]
    values = values if low is None else [low, *(v for v in values if v > low)]
    bottom = svg.HEIGHT - svg.BOTTOM_MARGIN
    across = svg.Scale([v for s in series for v, _ in s.points], x, svg.left_margin(y, values), right)
    up = svg.Scale(values, y, bottom, svg.TOP_MARGIN)
    # Lines drawn later lie on top: dashed ones, through which others are seen, and then the subjects of a page, which
    # come first. A line is thinner than those below it, so that lines of equal values all remain visible.
    order = sorted(series, key=lambda s: (s.dashed, -s.group))
    drawn: list[Markup] = []
    for n, s in enumerate(order, start=1):
        shown = s if detailed else s._replace(spread=())
        drawn.append(_line(shown, across, up, x, y, detailed, 1.8 + 1.6 * (1 - n / len(order))))
    if low is not None:
        box = {"y": svg.TOP_MARGIN - 6, "width": svg.WIDTH, "height": bottom - svg.TOP_MARGIN + 6}
        drawn = [tag("svg", *drawn, viewBox=f"0 {box['y']} {box['width']} {box['height']}", **box)]
    names = _names(series, across, up, letters) if named else []
    inside = [*svg.axes(across, up, x, y, svg.HEIGHT), *drawn, *names]
    return svg.chart(title, svg.HEIGHT, *inside, kind="lines", tabindex="0", data_top=svg.TOP_MARGIN)


def has_bands(series: Sequence[Series]) -> bool:
    """Return whether `line_chart` draws the spread of any series; a band needs two points."""
    return len(series) <= MAX_DETAILED_LINES and any(s.spread and len(s.points) > 1 for s in series)


def set_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places near the wanted ones, in their order, with a gap between neighbours, from `low` to `high`."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    placed = list(wanted)
    for i, before in zip(order, [None, *order], strict=False):
        placed[i] = max(wanted[i], low if before is None else placed[before] + gap)
    for i, after in zip(reversed(order), [None, *reversed(order)], strict=False):
        placed[i] = min(placed[i], high if after is None else placed[after] - gap)
    return placed


def _names(series: Sequence[Series], across: svg.Scale, up: svg.Scale, letters: int) -> list[Markup]:
    """Write the name of every line at the right, without overlap; a thin line leads to it from the line's end."""
    left = across.end + LABEL_GAP
    ends = [(across(s.points[-1][0]), up(s.points[-1][1])) for s in series]
    places = set_apart([y for _, y in ends], LABEL_HEIGHT, up.end, up.start)
    drawn = []
    for s, (x, y), place in zip(series, ends, places, strict=True):
        leader = tag("path", d=f"M{px(x + 3)} {px(y)}L{px(left - 2)} {px(place)}", class_="leader")
        name = tag("text", svg.shortened(s.name, letters), x=px(left), y=px(place + 4), class_="end")
        drawn.append(tag("g", leader, name, class_=_classes(s)))
    return drawn


def _classes(s: Series) -> str:
    return f"{svg.colour_class(s.look)} g{s.group}"


def _line(
    s: Series, across: svg.Scale, up: svg.Scale, x: svg.Axis, y: svg.Axis, detailed: bool, width: float
) -> Markup:
    places = [(across(a), up(b)) for a, b in s.points]
    parts = []
    if s.spread:
        edge = [(a, up(high)) for (a, _), (_, high) in zip(places, s.spread, strict=True)]
        back = [(a, up(low)) for (a, _), (low, _) in zip(places, s.spread, strict=True)][::-1]
        parts.append(tag("path", d=_route(edge + back) + "Z", class_="spread"))
    shown = [(x.show(a), y.show(b)) for a, b in s.points]
    told = {"data_name": s.name, "data_x": "|".join(a for a, _ in shown), "data_y": "|".join(b for _, b in shown)}
    told |= {"class_": "line dashed" if s.dashed else "line", "stroke_width": f"{width:.1f}"}
    parts.append(tag("path", d=_route(places), **told))
    every = 1 if detailed and len(places) <= MAX_MARKED_POINTS else len(places)
    every = max(1, len(places) // 4) if every > 1 and s.look.again else every
    for i in range(len(places) - 1, -1, -every):
        a, b = shown[i]
        parts.append(_marker(*places[i], s, tag("title", f"{s.name}: {b} ({x.label} {a})")))
    return tag("g", *parts, class_=_classes(s))


def _route(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{px(a)} {px(b)}" for a, b in places)


def _marker(x: float, y: float, s: Series, title: Markup) -> Markup:
    """Draw a disc, hollow on a dashed line; a square or a diamond if another line has the same colour."""
    again, kind = s.look.again, "dot hollow" if s.dashed else "dot"
    if not again:
        return tag("circle", title, cx=px(x), cy=px(y), r="2.6", class_=kind)
    turn = f"rotate({45 * (again - 1)} {px(x)} {px(y)})" if again > 1 else None
    return tag("rect", title, x=px(x - 3), y=px(y - 3), width="6", height="6", transform=turn, class_=kind)


def values_table(series: Sequence[Series], x: svg.Axis, y: svg.Axis) -> Markup:
    """Return the numbers of a chart, for people who read or hear them."""
    by_x: dict[float, dict[int, str]] = {}
    for i, s in enumerate(series):
        for a, b in s.points:
            by_x.setdefault(a, {})[i] = y.show(b)
    head = [tag("th", x.label), *(tag("th", s.name, class_=f"g{s.group}") for s in series)]
    body = []
    for a in svg.spaced(sorted(by_x), MAX_TABLE_ROWS):
        cells = [tag("td", by_x[a].get(i, "–"), class_=f"g{s.group}") for i, s in enumerate(series)]
        body.append(tag("tr", tag("td", x.show(a)), *cells))
    return svg.html_table(head, body, y.label)
