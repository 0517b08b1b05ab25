"""What a person is told when a request cannot be met: what was wrong, where, what would be right."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable

TRACEBACK = "FEDSLR_TRACEBACK"
"""Set in the environment by those who want to see more than a line: what is wrong in code of their own."""


INTERRUPTED = 130
"""The exit code of what was stopped by ctrl-C, as shells have it."""


class FedslrError(ValueError):
    """A request that cannot be met. Its text is one plain line; the command line exits with 2."""


class WireError(FedslrError):
    """A message that is not what it should be: truncated, oversized, mistyped, not finite."""


class CheckpointError(FedslrError):
    """A checkpoint that cannot be written or read."""


class StorageError(CheckpointError):
    """A file that the system does not give or take, for want of room or of permission: nothing is wrong with it."""


class TakenError(FedslrError):
    """A folder that another process works in."""


class FedslrWarning(UserWarning):
    """What a person may want to know of a request that is met all the same."""


class Interrupted(FedslrError):
    """A run that was asked to stop and did, after saving its last finished round."""


def suggest(name: str, known: Iterable[str]) -> str:
    """How to go on from a name nobody knows: the nearest known one, or all of them."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names) or 'none'}"


def show_traceback(error: BaseException) -> None:
    """All of an error, where somebody asked for it."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
