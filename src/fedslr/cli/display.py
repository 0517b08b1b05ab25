"""The consoles, the warnings and the live progress of commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedslr.data.image_decoding import decoding_progress
from fedslr.report.number_text import format_bytes, percent
from fedslr.run.jobs import Job, JobProgress
from fedslr.storage.record import Record, read_records

# Users choose names and paths: they are printed as they are, never read as markup.
out_console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
err_console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

MANY_IMAGES = 2000
"""Images from which on their decoding is shown."""


def warn(text: str) -> None:
    """Print a warning."""
    err_console.print(f"warning: {text}")


class Decoding:
    """The progress of decoding many images, as a line of a live display."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.line: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if total < MANY_IMAGES:
            return
        if self.line is None:
            self.line = self.progress.add_task("decoding images", total=total, status="")
        self.progress.update(self.line, completed=done)
        if done == total:
            self.progress.remove_task(self.line)
            self.line = None


@contextmanager
def decoding() -> Iterator[None]:
    """Show the decoding of many images, outside of any other display."""
    with progress_bars() as progress, decoding_progress(Decoding(progress)):
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
    """Progress that is shown inside a `with` block."""

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
        """Count the bytes of the rounds before a resumed run was stopped."""
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
            shared, own = percent(record.accuracy_global), percent(record.accuracy_personal)
            self.accuracy = f"global {shared}  personal {own}"
        rank = f"  rank {sum(record.rank.values())}" if record.rank else ""
        status = f"{self.accuracy}{rank}  down {format_bytes(self.down)}  up {format_bytes(self.up)}"
        self.progress.update(self.task, completed=record.round, status=status)
        if self.progress.disable and record.accuracy_personal is not None:
            err_console.print(f"round {record.round}/{self.rounds}  {status}")


class ManyDisplay(_Live):
    """One line for all runs of an experiment and one for each running one."""

    def __init__(self, jobs: list[Job]) -> None:
        self.rounds = {job.name: job.recipe.settings.rounds for job in jobs}
        self.done = dict.fromkeys(self.rounds, 0)
        self.lines: dict[str, TaskID] = {}
        self.progress = progress_bars("{task.description}")
        self.total = self.progress.add_task(f"{len(jobs)} runs", total=sum(self.rounds.values()), status="")

    def show(self, progress: JobProgress) -> None:
        rounds = self.rounds[progress.job]
        if progress.job not in self.lines:
            self.lines[progress.job] = self.progress.add_task(progress.job, total=rounds, status="")
        line = self.lines[progress.job]
        self.done[progress.job] = progress.round
        self.progress.update(self.total, completed=sum(self.done.values()))
        self.progress.update(line, completed=progress.round)
        if progress.accuracy_personal is not None:
            shared, own = percent(progress.accuracy_global), percent(progress.accuracy_personal)
            status = f"global {shared}  personal {own}"
            self.progress.update(line, status=status)
            if progress.round == rounds:
                self.progress.update(line, visible=False)
                err_console.print(f"{progress.job}: {status}")
