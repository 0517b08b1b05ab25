"""Inline SVG and HTML: elements, scales, axes and tables. `tag` makes every element and escapes its content."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from markupsafe import Markup, escape

from fedslr.report.colours import Look

WIDTH = 460
HEIGHT = 280
RIGHT_MARGIN = 14
TOP_MARGIN = 22
"""Holds the label of the upward axis."""
BOTTOM_MARGIN = 42
LETTER_WIDTH = 6.2
"""Approximate width of a letter of an axis."""
WIDE_LETTER_WIDTH = 7.2
"""Approximate width of a letter on a phone, where names are printed larger."""
MAX_NAME_LETTERS = 24
"""Longer names are broken or shortened."""

Item = TypeVar("Item")
Cell = str | tuple[str, float]
"""A text, or a text and the value that stands for it when its table is sorted."""


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """Return an element. `class_` and `data_x` become `class` and `data-x`; attributes of None are left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{''.join(escape(part) for part in inside)}</{name}>")


def html_table(head: Sequence[Markup], body: Sequence[Markup], caption: str | None = None) -> Markup:
    """Return a table of header cells and rows."""
    inside = [tag("thead", tag("tr", *head)), tag("tbody", *body)]
    return tag("table", *([] if caption is None else [tag("caption", caption)]), *inside)


def sortable_head(title: str, group: int | None = None) -> Markup:
    """Return a header cell whose button sorts the table; `group` is the place of a method that the page can hide."""
    return tag("th", tag("button", title, type="button"), class_=None if group is None else f"g{group}")


def sortable_cell(content: Cell, kind: str | None = None) -> Markup:
    shown, value = (content, None) if isinstance(content, str) else content
    return tag("td", shown, data_v=None if value is None else f"{value:.8g}", class_=kind)


def px(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def colour_class(look: Look) -> str:
    return f"c{look.colour}"


class Axis(NamedTuple):
    """The quantity of an axis and the format of its numbers."""

    label: str
    show: Callable[[float], str] = "{:g}".format
    log: bool = False
    low: float | None = None
    """The axis always shows this smallest value."""
    high: float | None = None
    whole: bool = False
    """Whether the quantity is a count."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The possible values; the space around a single value ends there."""


class Scale:
    """A map from values to coordinates."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float) -> None:
        low, high = min(values), max(values)
        self.log = axis.log and low > 0
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
        """Return about five round numbers along the axis."""
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


def chart(title: str, height: float, *inside: object, kind: str, **more: object) -> Markup:
    """Return a chart with a title for screen readers."""
    box = f"0 0 {WIDTH} {px(height)}"
    return tag("svg", tag("title", title), *inside, viewBox=box, role="img", class_=f"chart {kind}", **more)


def text(x: float, y: float, content: str, anchor: str | None = None, kind: str | None = None) -> Markup:
    return tag("text", content, x=px(x), y=px(y), text_anchor=anchor, class_=kind)


def axis_label(across: Scale, axis: Axis, height: float) -> Markup:
    return text((across.start + across.end) / 2, height - 5, axis.label, "middle", "label")


def shortened(name: str, letters: int) -> Markup:
    """Return a name, with its middle left out if it is too long; the element's title then holds all of it."""
    if len(name) <= letters:
        return escape(name)
    end = letters // 2
    return tag("title", name) + escape(f"{name[: letters - end - 1]}…{name[len(name) - end :]}")


def axes(across: Scale, up: Scale, x: Axis, y: Axis, height: float) -> list[Markup]:
    """Return grid, ticks and labels."""
    bottom = height - BOTTOM_MARGIN
    drawn = []
    for value in up.ticks():
        drawn.append(tag("path", d=f"M{px(across.start)} {px(up(value))}H{px(across.end)}", class_="grid"))
        drawn.append(text(across.start - 6, up(value) + 4, y.show(value), "end"))
    for value in across.ticks():
        at, shown = across(value), x.show(value)
        drawn.append(tag("path", d=f"M{px(at)} {px(bottom)}v4", class_="tick"))
        drawn.append(text(min(at, WIDTH - 4 - LETTER_WIDTH * len(shown) / 2), bottom + 17, shown, "middle"))
    drawn.append(tag("path", d=f"M{px(across.start)} {px(bottom)}H{px(across.end)}", class_="axis"))
    return [*drawn, axis_label(across, x, height), text(0, 11, y.label, kind="label up")]


def left_margin(axis: Axis, values: Sequence[float]) -> float:
    """Return the width that the longest tick of the upward axis needs."""
    return 14 + LETTER_WIDTH * max(len(axis.show(v)) for v in Scale(values, axis, 0, 1).ticks())


def spaced(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items, evenly spaced, always with the last one."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
