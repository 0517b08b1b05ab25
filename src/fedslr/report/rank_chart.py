"""Heat maps of the ranks of layers over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedslr.report import svg_axes as svg

ROW_HEIGHT = 17


class RankRow(NamedTuple):
    """The ranks of one layer over rounds."""

    layer: str
    shares: Sequence[float]
    """Ranks as shares of the largest, from 0 to 1."""
    titles: Sequence[str]
    """A text for each share."""
    end: str
    """The text at the end of the row."""


def rank_chart(title: str, rows: Sequence[RankRow], left: str, right: str, label: str) -> Markup:
    """Draw rows of cells; the larger a share, the fuller its colour. The axis goes from `left` to `right`."""
    letters = min(svg.MAX_NAME_LETTERS, max(len(r.layer) for r in rows))
    begin, end = 12 + svg.LETTER_WIDTH * letters, svg.WIDTH - 12 - svg.LETTER_WIDTH * max(len(r.end) for r in rows)
    drawn = []
    for i, row in enumerate(rows):
        y, wide = ROW_HEIGHT * i, (end - begin) / len(row.shares)
        drawn.append(
            svg.tag("text", svg.shortened(row.layer, letters), x=svg.px(begin - 6), y=svg.px(y + 12), text_anchor="end")
        )
        for j, (share, told) in enumerate(zip(row.shares, row.titles, strict=True)):
            cell = {"x": begin + wide * j, "y": y + 1, "width": wide + 0.3, "height": ROW_HEIGHT - 2}
            look = {"fill_opacity": f"{0.08 + 0.92 * share:.2f}", "class_": "cell"}
            drawn.append(
                svg.tag("rect", svg.tag("title", told), **{key: svg.px(value) for key, value in cell.items()}, **look)
            )
        drawn.append(svg.text(svg.WIDTH - 4, y + 12, row.end, "end"))
    bottom = ROW_HEIGHT * len(rows)
    drawn += [svg.text(begin, bottom + 15, left), svg.text(end, bottom + 15, right, "end")]
    drawn.append(svg.text((begin + end) / 2, bottom + 31, label, "middle", "label"))
    return svg.chart(title, bottom + svg.BOTTOM_MARGIN - 6, *drawn, kind="heat")
