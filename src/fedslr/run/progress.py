"""The live progress of runs, on a terminal, in a notebook or as lines of a log."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedslr.report.number_text import format_bytes
from fedslr.storage.record import Record, read_records

# Users choose names and paths: they are printed as they are, never read as markup.
err_console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

SECONDS_BETWEEN_UPDATES = 0.2
"""A notebook keeps every update until the next one, so fast rounds do not each send theirs."""


class JobProgress(NamedTuple):
    """A finished round of one of several runs."""

    job: str
    round: int
    scores: str | None
    """The headline metric of both models as text, after an evaluation."""


def is_watched() -> bool:
    """Return whether a person watches: the output goes to a terminal or to a notebook."""
    return err_console.is_terminal or err_console.is_jupyter


class NotebookProgress(Progress):
    """Bars in a notebook's output, where every update replaces the one before; rich's own need ipywidgets."""

    _shown: Any = None
    _shown_at = 0.0

    def start(self) -> None:
        if not self.disable:
            from IPython.display import display

            self._shown = display(self._text(), raw=True, display_id=True)

    def stop(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        if self._shown is not None:
            self._shown.update(self._text(), raw=True)
            self._shown_at = monotonic()

    def update(self, *args: Any, **fields: Any) -> None:
        super().update(*args, **fields)
        if monotonic() - self._shown_at > SECONDS_BETWEEN_UPDATES:
            self.refresh()

    def _text(self) -> dict[str, str]:
        console = Console(width=120, force_jupyter=False, color_system=None)
        with console.capture() as captured:
            console.print(self.get_renderable())
        return {"text/plain": "\n".join(line.rstrip() for line in captured.get().splitlines())}


def progress_bars(heading: str = "{task.description} {task.completed}/{task.total}", quiet: bool = False) -> Progress:
    """Return a display with one bar per task; it shows nothing if quiet or if nobody watches."""
    kind = NotebookProgress if err_console.is_jupyter else Progress
    return kind(
        TextColumn(heading, markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=err_console,
        disable=quiet or not is_watched(),
    )


class _Live:
    """Progress that is shown inside a `with` block."""

    _started = False

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __enter__(self) -> Self:
        # Runs in several threads share a terminal, and older versions of rich show one live display at a time.
        with contextlib.suppress(LiveError):
            self.progress.start()
            self._started = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._started:
            self.progress.stop()


class RunDisplay(_Live):
    """The progress of one run: a live line if a person watches, otherwise a line per evaluation; nothing if quiet."""

    def __init__(self, rounds: int, folder: Path | None, quiet: bool = False) -> None:
        super().__init__(progress_bars(quiet=quiet))
        self.rounds, self.folder, self.quiet = rounds, folder, quiet
        self.sent: tuple[int, int] | None = None
        self.scores = ""
        self.task = self.progress.add_task("round", total=rounds, status="")

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
        earlier = [r for r in (read_records(self.folder) if self.folder and round > 1 else []) if r["round"] < round]
        return sum(r["bytes_down"] for r in earlier), sum(r["bytes_up"] for r in earlier)


class ExperimentDisplay(_Live):
    """The progress of several runs: one line for all and one for each running one, given the rounds of every run."""

    def __init__(self, rounds: Mapping[str, int], quiet: bool = False) -> None:
        super().__init__(progress_bars("{task.description}", quiet))
        self.rounds, self.quiet = rounds, quiet
        self.done = dict.fromkeys(self.rounds, 0)
        self.lines: dict[str, TaskID] = {}
        self.total = self.progress.add_task(f"{len(rounds)} runs", total=sum(rounds.values()), status="")

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
            if progress.round == rounds and not self.quiet and not err_console.is_jupyter:
                err_console.print(f"{progress.job}: {progress.scores}")
