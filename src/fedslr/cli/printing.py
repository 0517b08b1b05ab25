"""Tables, summaries and JSON in the terminal."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table

from fedslr.cli.display import out_console
from fedslr.report.result_tables import DROPPED_WHEN_NARROW
from fedslr.report.result_tables import Table as TextTable
from fedslr.report.run_facts import run_facts
from fedslr.storage.statistics import headline_of


def print_table(made: TextTable) -> None:
    """Print a table no wider than the terminal; elsewhere, as wide as it is.

    Cells first take several lines; then the least important columns are left out; at last, each row is a paragraph.
    """
    whole = sum(_widths(made, words=False))
    room = out_console.width if out_console.is_terminal else max(out_console.width, whole)
    shown, left_out = made, []
    for kind in DROPPED_WHEN_NARROW:
        title = shown.column_titled(kind)
        if title is not None and sum(_widths(shown, words=True)) > room:
            shown = shown.without(title)
            left_out.append(title)
    if sum(_widths(shown, words=True)) > room:
        _print_paragraphs(made)
        return
    drawn = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, (title, width) in enumerate(zip(shown.titles, _fitted(shown, room), strict=True)):
        label = i < shown.labels
        justify: JustifyMethod = "left" if label else "right"
        drawn.add_column(title, justify=justify, no_wrap=label, overflow="fold", width=width)
    for row in shown.rows:
        drawn.add_row(*row)
    console = out_console
    if room > console.width:
        console = Console(file=out_console.file, highlight=False, markup=False, emoji=False, width=room)
    console.print(drawn)
    if left_out:
        out_console.print(f"left out for lack of width: {', '.join(reversed(left_out))}", style="dim")


def _print_paragraphs(made: TextTable) -> None:
    for row in made.rows:
        cells = [f"{title} {cell}" for title, cell in zip(made.titles, row, strict=True)]
        out_console.print(", ".join(cells[: made.labels]), style="bold")
        out_console.print(Padding(", ".join(cells[made.labels :]), (0, 0, 0, 2)))


def _widths(made: TextTable, words: bool) -> list[int]:
    """Return the width of every column with a space behind it: of its longest cell, or of its longest word."""
    columns = [[title, *(row[i] for row in made.rows)] for i, title in enumerate(made.titles)]
    parts = [" ".join(c).split() if words and i >= made.labels else c for i, c in enumerate(columns)]
    return [max(map(cell_len, column)) + 1 for column in parts]


def _fitted(made: TextTable, room: int) -> list[int]:
    """Return widths that fit, taken from the columns that have most to spare."""
    widths, least = _widths(made, words=False), _widths(made, words=True)
    while sum(widths) > room:
        widths[max(range(len(widths)), key=lambda i: widths[i] - least[i])] -= 1
    return [width - 1 for width in widths]


def print_json(data: Any) -> None:
    """Print data as JSON, for scripts."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_summary(summary: dict[str, Any], records: list[dict[str, Any]], width: int) -> None:
    table = Table(
        title=f"{summary['algorithm']} on {summary['dataset']}",
        box=None,
        title_justify="left",
        pad_edge=False,
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in run_facts(summary, records, headline_of(summary), width):
        table.add_row(*row)
    out_console.print(table)
