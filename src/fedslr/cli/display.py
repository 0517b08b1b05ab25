"""What people see while a command works and when it is done: progress, warnings, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedslr import report
from fedslr.data.images import reporting
from fedslr.report import tables
from fedslr.run import experiments
from fedslr.storage.record import Record, read_records

# Names and paths are people's own: they are printed as they are, never read as markup.
out_console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
err_console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

MANY = 2000
"""Images whose decoding is shown."""


def warn(text: str) -> None:
    """What a person may want to know of a request that is met all the same."""
    err_console.print(f"warning: {text}")


class Decoding:
    """How far the decoding of many images is, as a line of a live display."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.line: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if total < MANY:
            return
        if self.line is None:
            self.line = self.progress.add_task("decoding images", total=total, status="")
        self.progress.update(self.line, completed=done)
        if done == total:
            self.progress.remove_task(self.line)
            self.line = None


@contextmanager
def decoding() -> Iterator[None]:
    """Show the decoding of many images by itself."""
    with progress_bars() as progress, reporting(Decoding(progress)):
        yield


def progress_bars(heading: str = "{task.description} {task.completed}/{task.total}") -> Progress:
    return Progress(
        TextColumn(heading, markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=err_console,
        disable=not err_console.is_terminal,
    )


class _Live:
    """Progress that is shown while something lasts."""

    progress: Progress

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def warn(self, text: str) -> None:
        warn(text)


class Display(_Live):
    """Live progress on a terminal; a line per evaluation elsewhere; nothing from a process that is not the first."""

    def __init__(self, rounds: int, folder: Path, quiet: bool = False) -> None:
        self.rounds = rounds
        self.folder = folder
        self.quiet = quiet
        self.down = self.up = 0
        self.begun = False
        self.accuracy = ""
        self.progress = progress_bars()
        self.progress.disable |= quiet
        self.task = self.progress.add_task("round", total=rounds, status="")

    def warn(self, text: str) -> None:
        if not self.quiet:
            super().warn(text)

    def _count_earlier(self, record: Record) -> None:
        """A resumed run goes on counting where it stopped."""
        self.begun = True
        for earlier in read_records(self.folder) if record.round > 1 else []:
            if earlier["round"] < record.round:
                self.down += earlier["bytes_down"]
                self.up += earlier["bytes_up"]

    def show(self, record: Record) -> None:
        if self.quiet:
            return
        if not self.begun:
            self._count_earlier(record)
        self.down += record.bytes_down
        self.up += record.bytes_up
        if record.accuracy_personal is not None:
            shared, own = report.percent(record.accuracy_global), report.percent(record.accuracy_personal)
            self.accuracy = f"global {shared}  personal {own}"
        rank = f"  rank {sum(record.rank.values())}" if record.rank else ""
        status = f"{self.accuracy}{rank}  down {report.amount(self.down)}  up {report.amount(self.up)}"
        self.progress.update(self.task, completed=record.round, status=status)
        if self.progress.disable and record.accuracy_personal is not None:
            err_console.print(f"round {record.round}/{self.rounds}  {status}")


class ManyDisplay(_Live):
    """One line for all runs of an experiment and one for each that is under way."""

    def __init__(self, jobs: list[experiments.Job]) -> None:
        self.rounds = {job.name: job.recipe.settings.rounds for job in jobs}
        self.done = dict.fromkeys(self.rounds, 0)
        self.lines: dict[str, TaskID] = {}
        self.progress = progress_bars("{task.description}")
        self.total = self.progress.add_task(f"{len(jobs)} runs", total=sum(self.rounds.values()), status="")

    def show(self, said: experiments.Progress) -> None:
        rounds = self.rounds[said.job]
        if said.job not in self.lines:
            self.lines[said.job] = self.progress.add_task(said.job, total=rounds, status="")
        line = self.lines[said.job]
        self.done[said.job] = said.round
        self.progress.update(self.total, completed=sum(self.done.values()))
        self.progress.update(line, completed=said.round)
        if said.accuracy_personal is not None:
            status = f"global {report.percent(said.accuracy_global)}  personal {report.percent(said.accuracy_personal)}"
            self.progress.update(line, status=status)
            if said.round == rounds:
                self.progress.update(line, visible=False)
                err_console.print(f"{said.job}: {status}")


def print_table(made: tables.Table) -> None:
    """A table as wide as the screen: cells over several lines first, then without the columns that matter least, and
    if that does not help, one paragraph for every row. What is no screen has room for everything."""
    whole = sum(_widths(made, words=False))
    room = out_console.width if out_console.is_terminal else max(out_console.width, whole)
    shown, left_out = made, []
    for kind in tables.SPARE:
        title = tables.spare(shown, kind)
        if title is not None and sum(_widths(shown, words=True)) > room:
            shown = tables.without(shown, title)
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
        out_console.print(f"left out, for want of width: {', '.join(reversed(left_out))}", style="dim")


def _print_paragraphs(made: tables.Table) -> None:
    for row in made.rows:
        cells = [f"{title} {cell}" for title, cell in zip(made.titles, row, strict=True)]
        out_console.print(", ".join(cells[: made.labels]), style="bold")
        out_console.print(Padding(", ".join(cells[made.labels :]), (0, 0, 0, 2)))


def _widths(made: tables.Table, words: bool) -> list[int]:
    """What every column needs, with a space behind it: for its cells, or for its words where cells may be broken."""
    columns = [[title, *(row[i] for row in made.rows)] for i, title in enumerate(made.titles)]
    parts = [" ".join(c).split() if words and i >= made.labels else c for i, c in enumerate(columns)]
    return [max(map(cell_len, column)) + 1 for column in parts]


def _fitted(made: tables.Table, room: int) -> list[int]:
    """Widths that fit, taken from the columns that have most to spare."""
    widths, least = _widths(made, words=False), _widths(made, words=True)
    while sum(widths) > room:
        widths[max(range(len(widths)), key=lambda i: widths[i] - least[i])] -= 1
    return [width - 1 for width in widths]


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
    for row in report.table_rows(summary, records, width):
        table.add_row(*row)
    out_console.print(table)
