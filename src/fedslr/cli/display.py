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
from fedslr.report.number_text import format_bytes
from fedslr.run.jobs import Job, JobProgress
from fedslr.storage.record import Record, read_records

# Users choose names and paths: they are printed as they are, never read as markup.
out_console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)
err_console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

MIN_SHOWN_IMAGES = 2000
"""The decoding of fewer images is not shown."""


def warn(text: str) -> None:
    """Print a warning."""
    err_console.print(f"warning: {text}")


class Decoding:
    """The progress of decoding many images, as a line of a live display."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.line: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if total < MIN_SHOWN_IMAGES:
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


def progress_bars(heading: str = "{task.description} {task.completed}/{task.total}", quiet: bool = False) -> Progress:
    """Return a display with one bar per task; it shows nothing if quiet or if nobody watches a terminal."""
    return Progress(
        TextColumn(heading, markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=err_console,
        disable=quiet or not err_console.is_terminal,
    )


class _Live:
    """Progress that is shown inside a `with` block."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

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
        super().__init__(progress_bars(quiet=quiet))
        self.rounds, self.folder, self.quiet = rounds, folder, quiet
        self.sent: tuple[int, int] | None = None
        self.scores = ""
        self.task = self.progress.add_task("round", total=rounds, status="")

    def warn(self, text: str) -> None:
        if not self.quiet:
            super().warn(text)

    def show(self, record: Record) -> None:
        """Show a finished round."""
        if self.quiet:
            return
        down, up = self._sent_before(record.round) if self.sent is None else self.sent
        self.sent = down + record.bytes_down, up + record.bytes_up
        scores = record.scores_text()
        self.scores = scores or self.scores
        rank = f"  rank {sum(record.rank.values())}" if record.rank else ""
        status = f"{self.scores}{rank}  down {format_bytes(self.sent[0])}  up {format_bytes(self.sent[1])}"
        self.progress.update(self.task, completed=record.round, status=status)
        if self.progress.disable and scores:
            err_console.print(f"round {record.round}/{self.rounds}  {status}")

    def _sent_before(self, round: int) -> tuple[int, int]:
        """Return the bytes down and up of the rounds before a resumed run was stopped."""
        earlier = [r for r in (read_records(self.folder) if round > 1 else []) if r["round"] < round]
        return sum(r["bytes_down"] for r in earlier), sum(r["bytes_up"] for r in earlier)


class ManyDisplay(_Live):
    """One line for all runs of an experiment and one for each running one."""

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(progress_bars("{task.description}"))
        self.rounds = {job.name: job.recipe.settings.rounds for job in jobs}
        self.done = dict.fromkeys(self.rounds, 0)
        self.lines: dict[str, TaskID] = {}
        self.total = self.progress.add_task(f"{len(jobs)} runs", total=sum(self.rounds.values()), status="")

    def show(self, progress: JobProgress) -> None:
        """Show a finished round of a run."""
        rounds = self.rounds[progress.job]
        if progress.job not in self.lines:
            self.lines[progress.job] = self.progress.add_task(progress.job, total=rounds, status="")
        line = self.lines[progress.job]
        self.done[progress.job] = progress.round
        self.progress.update(self.total, completed=sum(self.done.values()))
        self.progress.update(line, completed=progress.round)
        if progress.scores is not None:
            self.progress.update(line, status=progress.scores, visible=progress.round < rounds)
            if progress.round == rounds:
                err_console.print(f"{progress.job}: {progress.scores}")
