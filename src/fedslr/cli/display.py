"""The consoles, the warnings and the live progress of commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from fedslr.data.image_decoding import decoding_progress
from fedslr.run.progress import err_console, progress_bars

# Users choose names and paths: they are printed as they are, never read as markup.
out_console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 160)

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
