"""Tables of results as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from fedslr.report.result_tables import Column, Table
from fedslr.report.run_groups import Group
from fedslr.report.svg_axes import html_table, tag


def text(made: Table) -> str:
    """Return a table as aligned lines: labels on the left, figures on the right of their columns."""
    lines = [made.titles, *made.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust] * made.labels + [str.rjust] * (len(widths) - made.labels)
    cells = [[side(c, w) for side, c, w in zip(sides, line, widths, strict=True)] for line in lines]
    return "".join("  ".join(line).rstrip() + "\n" for line in cells)


def html(made: Table, caption: str | None = None) -> str:
    """Return a table as HTML without scripts, for notebooks."""

    def cells(kind: str, row: Sequence[str]) -> list[Markup]:
        return [tag(kind, cell, style="text-align: left" if i < made.labels else None) for i, cell in enumerate(row)]

    head = cells("th", made.titles) if any(made.titles) else []
    return str(html_table(head, [tag("tr", *cells("td", row)) for row in made.rows], caption))


def markdown(made: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("\\", "\\\\").replace("|", "\\|") for c in cells) + " |"

    rule = ["---"] * made.labels + ["---:"] * (len(made.titles) - made.labels)
    return "\n".join([line(made.titles), line(rule), *(line(row) for row in made.rows)]) + "\n"


LATEX_ESCAPES = {"\\": r"\textbackslash{}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{",
                 "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
                 "–": "--"}  # fmt: skip


def latex(made: Table) -> str:
    """Return a booktabs tabular."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(LATEX_ESCAPES.get(ch, ch) for ch in c) for c in cells) + r" \\"

    shape = "l" * made.labels + "r" * (len(made.titles) - made.labels)
    body = [line(row) for row in made.rows]
    head = [rf"\begin{{tabular}}{{{shape}}}", r"\toprule", line(made.titles), r"\midrule"]
    return "\n".join([*head, *body, r"\bottomrule", r"\end{tabular}", ""])


def comma_separated(groups: Sequence[Group], figures: Sequence[Column]) -> str:
    """Return plain numbers: for every figure a mean and a standard deviation, and the number of seeds."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    titles = [title for c in figures for title in (c.key, f"{c.key}_std")]
    writer.writerow([*groups[0].labels, "seeds", *titles])
    for one in groups:
        cells: list[Any] = []
        for column in figures:
            cells += ["" if v is None else v for v in column.figures(one.runs)]
        writer.writerow([*one.labels.values(), len(one.runs), *cells])
    return out.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {
    "text": text,
    "markdown": markdown,
    "latex": latex,
}
"""The formats of any table; CSV has plain numbers, which need the groups."""
