"""Charts as inline SVG: sizes a phone can read, colours from the page's style sheet, every value in reach.

Every element is made by `tag`, which escapes whatever it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup, escape

from fedslr.report import plural
from fedslr.report.colours import Look

WIDTH = 460
HEIGHT = 280
RIGHT = 14
TOP = 22
"""Room for what the upward axis measures."""
BOTTOM = 42
LETTER = 6.2
"""Width of a letter of the small print, about."""
BROAD = 7.2
"""The same in a phone's larger print, where words must not run into each other."""
NAME = 24
"""Letters of a row's name that is not broken, at most."""
LINE = 28
"""Letters of a line of a broken one, at most."""
FEW = 8
"""Lines beyond which bands and dots would hide each other."""
MARKED = 25
"""Points of a line that are drawn one by one, at most."""

Point = tuple[float, float]
Item = TypeVar("Item")


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element; `class_` and `data_x` are spelt as HTML spells them, what is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{''.join(escape(part) for part in inside)}</{name}>")


def px(value: float) -> str:
    """A coordinate, as short as it may be."""
    return f"{value:.1f}".removesuffix(".0")


class Axis(NamedTuple):
    """What an axis measures, and how its numbers are written."""

    label: str
    show: Callable[[float], str] = "{:g}".format
    log: bool = False
    low: float | None = None
    """The smallest value that is always shown."""
    high: float | None = None
    whole: bool = False
    """Whether it counts something."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Between which values can be; the room about a single one ends there."""


class Series(NamedTuple):
    """One line of a chart."""

    name: str
    group: int
    """Whose line it is: a legend hides it with the others of its group."""
    look: Look
    points: Sequence[Point]
    dashed: bool = False
    spread: Sequence[Point] = ()
    """The lowest and the highest value at every point, where there were several."""


class Scale:
    """Values to coordinates."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float) -> None:
        self.log = axis.log and min(values) > 0
        low, high = min(values), max(values)
        if not self.log:
            low = low if axis.low is None else min(low, axis.low)
            high = high if axis.high is None else max(high, axis.high)
        if high <= low:
            # A single value is shown in the middle.
            low, high = (low / 2, high * 2) if self.log else (low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1))
            low, high = max(low, axis.bounds[0]), min(high, axis.bounds[1])
        self.low, self.high, self.start, self.end = low, high, start, end
        self.whole = axis.whole

    def __call__(self, value: float) -> float:
        a, b, v = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (v - a) / (b - a) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers along the axis, about five."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            found = [m * 10.0**e for e in range(first, last + 1, max(1, (last - first) // 4)) for m in steps]
            return [v for v in found if self.low * 0.999 <= v <= self.high * 1.001] or [self.low, self.high]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        found = [round(n * step, 12) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        whole = [v for v in found if not self.whole or v == round(v)]
        return whole or [float(math.ceil(self.low)) if self.whole else self.low]


def frame(title: str, height: float, *inside: object, kind: str = "", **more: object) -> Markup:
    """A chart that says what it shows."""
    box = f"0 0 {WIDTH} {px(height)}"
    named = tag("title", title)
    return tag("svg", named, *inside, viewBox=box, role="img", class_=f"chart {kind}".strip(), **more)


def text(x: float, y: float, content: str, anchor: str = "start", kind: str | None = None) -> Markup:
    return tag("text", content, x=px(x), y=px(y), text_anchor=None if anchor == "start" else anchor, class_=kind)


def shortened(name: str, letters: int) -> Markup:
    """A name that fits: its end, which says what value and whose model it is, stays. All of it is in the title."""
    if len(name) <= letters:
        return escape(name)
    end = letters // 2
    return tag("title", name) + escape(f"{name[: letters - end - 1]}…{name[len(name) - end :]}")


def in_two(name: str) -> list[str]:
    """A name as one line, or, where it is too long for one, as two of about the same length."""
    parts = name.split(", ")
    if len(name) <= NAME or len(parts) == 1:
        return [name]
    halves = [(", ".join(parts[:n]) + ",", ", ".join(parts[n:])) for n in range(1, len(parts))]
    return list(min(halves, key=lambda pair: max(map(len, pair))))


def _row_name(name: str, x: float, y: float, letters: int) -> list[Markup]:
    lines = in_two(name)
    first = y - 6.5 * (len(lines) - 1)
    return [
        tag("text", shortened(line, letters), x=px(x), y=px(first + 13 * n), text_anchor="end")
        for n, line in enumerate(lines)
    ]


def _axes(across: Scale, up: Scale, x: Axis, y: Axis, height: float) -> list[Markup]:
    """Grid, ticks and labels."""
    bottom = height - BOTTOM
    drawn = []
    for value in up.ticks():
        level = px(up(value))
        drawn.append(tag("path", d=f"M{px(across.start)} {level}H{px(across.end)}", class_="grid"))
        drawn.append(text(across.start - 6, up(value) + 4, y.show(value), "end"))
    for value in across.ticks():
        at = across(value)
        drawn.append(tag("path", d=f"M{px(at)} {px(bottom)}v4", class_="tick"))
        drawn.append(text(min(at, WIDTH - 4 - LETTER * len(x.show(value)) / 2), bottom + 17, x.show(value), "middle"))
    drawn.append(tag("path", d=f"M{px(across.start)} {px(bottom)}H{px(across.end)}", class_="axis"))
    drawn.append(text((across.start + across.end) / 2, height - 5, x.label, "middle", "label"))
    drawn.append(text(0, 11, y.label, kind="label up"))
    return drawn


def _margin(axis: Axis, values: Sequence[float]) -> float:
    """Room for the longest tick on the left."""
    trial = Scale(values, axis, 0, 1)
    return 14 + LETTER * max(len(axis.show(v)) for v in trial.ticks())


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis, key: bool = False, height: float = HEIGHT) -> Markup:
    """One line for every series, over a common axis; with a key where no legend names them."""
    values = [v for s in series for _, v in s.points] + [v for s in series for pair in s.spread for v in pair]
    named, more = _key(series, y.label) if key else ([], 0.0)
    top, height = TOP + more, height + more
    across = Scale([v for s in series for v, _ in s.points], x, _margin(y, values), WIDTH - RIGHT)
    up = Scale(values, y, height - BOTTOM, top)
    few = len(series) <= FEW
    drawn = [_line(s if few else s._replace(spread=()), across, up, x, y, few) for s in series]
    # The last is on top, and the first series is what a page is about.
    inside = [*_axes(across, up, x, y, height), *reversed(drawn), *named]
    return frame(title, height, *inside, kind="lines", tabindex="0", data_top=px(top))


def has_bands(series: Sequence[Series]) -> bool:
    """Whether `lines` draws the spread of any; a band has two points at least."""
    return len(series) <= FEW and any(s.spread and len(s.points) > 1 for s in series)


SAMPLE = 26
"""Width of a line in a key, and of the gap between it and its name."""
KEY_ROW = 16


def _key(series: Sequence[Series], label: str) -> tuple[list[Markup], float]:
    """What lines are: at the right of the axis' label, or in rows below it where they do not fit; the rows' height."""
    most, gap = int((WIDTH - SAMPLE) / BROAD), 12
    widths = [SAMPLE + BROAD * min(len(s.name), most) for s in series]
    at, y = WIDTH - sum(widths) - gap * (len(series) - 1), 11.0
    fits = at >= BROAD * len(label) + gap
    drawn = []
    for n, (s, wide) in enumerate(zip(series, widths, strict=True)):
        if not fits and (n == 0 or at + wide > WIDTH):
            at, y = 0.0, y + KEY_ROW
        line = tag("path", d=f"M{px(at)} {px(y - 4)}h20", class_="sample dashed" if s.dashed else "sample")
        drawn.append(tag("g", line, _marker(at + 10, y - 4, s), class_=paint(s.look)))
        drawn.append(tag("text", shortened(s.name, most), x=px(at + SAMPLE), y=px(y)))
        at += wide + gap
    return drawn, y - 11


def _line(s: Series, across: Scale, up: Scale, x: Axis, y: Axis, few: bool) -> Markup:
    places = [(across(a), up(b)) for a, b in s.points]
    route = "M" + "L".join(f"{px(a)} {px(b)}" for a, b in places)
    parts: list[object] = []
    if s.spread:
        edge = [(a, up(high)) for (a, _), (_, high) in zip(places, s.spread, strict=True)]
        back = [(a, up(low)) for (a, _), (low, _) in zip(places, s.spread, strict=True)][::-1]
        parts.append(tag("path", d="M" + "L".join(f"{px(a)} {px(b)}" for a, b in edge + back) + "Z", class_="spread"))
    parts.append(
        tag(
            "path",
            d=route,
            class_="line dashed" if s.dashed else "line",
            data_name=s.name,
            data_x="|".join(x.show(a) for a, _ in s.points),
            data_y="|".join(y.show(b) for _, b in s.points),
        )
    )
    every = 1 if few and len(places) <= MARKED else max(1, len(places) // 4) if s.look.again else len(places)
    for i in range(len(places) - 1, -1, -every):
        told = tag("title", f"{s.name}: {y.show(s.points[i][1])} ({x.label} {x.show(s.points[i][0])})")
        parts.append(_marker(*places[i], s, told))
    return tag("g", *parts, class_=f"{paint(s.look)} g{s.group}")


def _marker(x: float, y: float, s: Series, told: str = "") -> Markup:
    """A disc, hollow on a dashed line; a square or a diamond for those whose colour is another's too."""
    again, kind = s.look.again, "dot hollow" if s.dashed else "dot"
    if not again:
        return tag("circle", told, cx=px(x), cy=px(y), r="2.6", class_=kind)
    turn = f"rotate({45 * (again - 1)} {px(x)} {px(y)})" if again > 1 else None
    return tag("rect", told, x=px(x - 3), y=px(y - 3), width="6", height="6", transform=turn, class_=kind)


def paint(look: Look) -> str:
    return f"c{look.colour}"


class Violin(NamedTuple):
    """How one number is spread over clients."""

    name: str
    group: int
    look: Look
    values: Sequence[float]
    clients: Sequence[str]
    """Whose values they are."""
    hollow: bool = False


ROW = 34


def violins(title: str, rows: Sequence[Violin], axis: Axis, zero: str | None = None, dots: bool = True) -> Markup:
    """A row for each: where clients are dense the shape is wide; the bar is their middle half, the dot the median."""
    letters = min(LINE, max(len(line) for r in rows for line in in_two(r.name)))
    across = Scale([v for r in rows for v in r.values], axis, 8 + BROAD * letters, WIDTH - RIGHT)
    top = 4
    height = ROW * len(rows) + top + BOTTOM
    bottom = height - BOTTOM
    drawn = []
    for value in across.ticks():
        drawn.append(tag("path", d=f"M{px(across(value))} {top}V{px(bottom)}", class_="grid"))
        drawn.append(text(across(value), bottom + 17, axis.show(value), "middle"))
    drawn.append(text((across.start + across.end) / 2, height - 5, axis.label, "middle", "label"))
    if zero is not None:
        line = tag("path", tag("title", zero), d=f"M{px(across(0))} {top}V{px(bottom)}", class_="zero")
        drawn.append(line)
    for i, row in enumerate(rows):
        drawn.append(_violin(row, across, top + ROW * (i + 0.5), axis, letters, dots))
    return frame(title, height, *drawn, kind="violins")


def density(values: Sequence[float], at: np.ndarray) -> np.ndarray:
    """A Gaussian kernel density with Silverman's width, its largest value 1."""
    x = np.asarray(values, float)
    spread = float(x.std()) or (float(at[-1] - at[0]) or 1.0) / 50
    width = 0.9 * spread * len(x) ** -0.2
    heights = np.exp(-0.5 * ((at[:, None] - x[None]) / width) ** 2).sum(1)
    found: np.ndarray = heights / heights.max()
    return found


def _violin(row: Violin, across: Scale, middle: float, axis: Axis, letters: int, dots: bool) -> Markup:
    low, q1, median, q3, high = np.quantile(row.values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    told = f"{row.name}: median {axis.show(median)}, middle half {axis.show(q1)} to {axis.show(q3)}"
    told += f", from {axis.show(low)} to {axis.show(high)}, {plural(len(row.values), 'client')}"
    parts = _row_name(row.name, across.start - 8, middle + 4, letters)
    if high > low:
        at = np.linspace(low, high, 48)
        wide = density(row.values, at) * (ROW / 2 - 3)
        over = [f"{px(across(v))} {px(middle - w)}" for v, w in zip(at, wide, strict=True)]
        under = [f"{px(across(v))} {px(middle + w)}" for v, w in zip(at[::-1], wide[::-1], strict=True)]
        shape = "M" + "L".join(over + under) + "Z"
        parts.append(tag("path", tag("title", told), d=shape, class_="violin hollow" if row.hollow else "violin"))
    if dots:
        parts += [
            tag(
                "circle",
                tag("title", f"{row.name}, {who}: {axis.show(value)}"),
                cx=px(across(value)),
                # Spread evenly and always alike, so that clients of equal accuracy do not hide each other.
                cy=px(middle + (i * 0.618 % 1 - 0.5) * (ROW / 2 - 6)),
                r="1.7",
                class_="client",
            )
            for i, (value, who) in enumerate(zip(row.values, row.clients, strict=True))
        ]
    parts.append(tag("path", d=f"M{px(across(q1))} {px(middle)}H{px(across(q3))}", class_="half"))
    parts.append(tag("circle", tag("title", told), cx=px(across(median)), cy=px(middle), r="4", class_="median"))
    return tag("g", *parts, class_=f"{paint(row.look)} g{row.group}")


class Strip(NamedTuple):
    """A row of a heat map: a name, shares from 0 to 1, what each is, and a word at the end."""

    name: str
    shares: Sequence[float]
    told: Sequence[str]
    end: str


def heat(title: str, rows: Sequence[Strip], left: str, right: str, label: str) -> Markup:
    """Rows of cells, the fuller their colour the larger; the axis goes from `left` to `right`."""
    letters, row = min(NAME, max(len(r.name) for r in rows)), 17
    begin, end = 12 + LETTER * letters, WIDTH - 12 - LETTER * max(len(r.end) for r in rows)
    height = row * len(rows) + BOTTOM - 6
    drawn = []
    for i, strip in enumerate(rows):
        y, wide = row * i, (end - begin) / len(strip.shares)
        drawn.append(tag("text", shortened(strip.name, letters), x=px(begin - 6), y=px(y + 12), text_anchor="end"))
        for j, (share, told) in enumerate(zip(strip.shares, strip.told, strict=True)):
            cell = {"x": px(begin + wide * j), "y": px(y + 1), "width": px(wide + 0.3), "height": px(row - 2)}
            drawn.append(
                tag("rect", tag("title", told), **cell, fill_opacity=f"{0.08 + 0.92 * share:.2f}", class_="cell")
            )
        drawn.append(text(WIDTH - 4, y + 12, strip.end, "end"))
    bottom = row * len(rows)
    drawn += [text(begin, bottom + 15, left), text(end, bottom + 15, right, "end")]
    drawn.append(text((begin + end) / 2, bottom + 31, label, "middle", "label"))
    return frame(title, height, *drawn, kind="heat")


def stacked(title: str, counts: np.ndarray, x: Axis, y: Axis, height: float = HEIGHT) -> Markup:
    """A bar for every row of the counts, a colour for every column: one path each."""
    tops = counts.cumsum(1)
    left = _margin(y, [0, float(tops.max())])
    # A client stands in the middle of its bar.
    across = Scale([-0.5, len(counts) - 0.5], x, left, WIDTH - RIGHT)
    up = Scale([0, float(tops.max())], y, height - BOTTOM, TOP)
    wide = across(1) - across(0)
    gap = min(1.0, wide / 5)
    drawn = []
    for column in range(counts.shape[1]):
        bars = "".join(
            f"M{px(across(i - 0.5) + gap / 2)} {px(up(tops[i, column]))}h{px(wide - gap)}V{px(up(tops[i, column] - n))}"
            f"h{px(gap - wide)}z"
            for i, n in enumerate(counts[:, column])
            if n
        )
        if bars:
            told = tag("title", f"label {column}: {plural(int(counts[:, column].sum()), 'sample')}")
            drawn.append(tag("path", told, d=bars, class_="bar", fill=label_colour(column, counts.shape[1])))
    if counts.shape[1] <= len(LABELS):
        drawn += _label_key(counts.shape[1])
    return frame(title, height, *_axes(across, up, x, y, height), *drawn, kind="stacked")


def _label_key(labels: int) -> list[Markup]:
    drawn = []
    for label in range(labels):
        at = WIDTH - RIGHT - 30 * (labels - label)
        colour = label_colour(label, labels)
        drawn.append(tag("rect", x=px(at), y="2", width="10", height="10", fill=colour))
        drawn.append(text(at + 13, 11, str(label)))
    return drawn


LABELS = ("#4A3FB5", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB")
"""Tol's muted colours, for labels; methods have others. His indigo is lighter here, for dark pages."""


def label_colour(label: int, labels: int) -> str:
    if labels <= len(LABELS):
        return LABELS[label]
    # Neighbours far apart in hue, and every third lighter.
    return f"hsl({label * 137.5 % 360:.0f} 55% {(42, 56, 70)[label % 3]}%)"


def values_table(series: Sequence[Series], x: Axis, y: Axis, most: int = 40) -> Markup:
    """The numbers of a chart, for those who read or hear them."""
    by_x: dict[float, dict[int, str]] = {}
    for i, s in enumerate(series):
        for a, b in s.points:
            by_x.setdefault(a, {})[i] = y.show(b)
    rows = spaced(sorted(by_x), most)
    head = tag("tr", tag("th", x.label), *(tag("th", s.name, class_=f"g{s.group}") for s in series))
    body = [
        tag(
            "tr",
            tag("td", x.show(a)),
            *(tag("td", by_x[a].get(i, "–"), class_=f"g{s.group}") for i, s in enumerate(series)),
        )
        for a in rows
    ]
    return tag("table", tag("caption", y.label), tag("thead", head), tag("tbody", *body))


def spaced(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of some items, evenly spaced, the last one always."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
