"""Errors and warnings for users: each says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable

TRACEBACK = "FEDSLR_TRACEBACK"
"""The environment variable that shows tracebacks, for users with code of their own."""


INTERRUPTED = 130
"""The exit code of a command that was stopped by ctrl-C, as in shells."""


class FedslrError(ValueError):
    """A request that cannot be met. Its text is one plain line; the command line exits with 2."""


class WireError(FedslrError):
    """A message that is truncated, too large, malformed or not finite."""


class CheckpointError(FedslrError):
    """A checkpoint that cannot be written or read."""


class StorageError(CheckpointError):
    """A file that cannot be read or written because of a full disk or permissions; the file itself is not damaged."""


class TakenError(FedslrError):
    """A folder that another process is using."""


class FedslrWarning(UserWarning):
    """Advice on a request that is carried out nevertheless."""


class Interrupted(FedslrError):
    """A run that was asked to stop and stopped after saving its last finished round."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return advice on an unknown name: the nearest known name, or all known names."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names) or 'none'}"


def show_traceback(error: BaseException) -> None:
    """Print the traceback of an error if the environment asks for it."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
