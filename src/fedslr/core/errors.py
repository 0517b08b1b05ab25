"""Errors and warnings for users. A message tells what was wrong, where it was, and what to do."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable

TRACEBACK = "FEDSLR_TRACEBACK"
"""The environment variable that makes the command line print tracebacks of users' own code."""

INTERRUPTED = 130
"""The exit code of a command that ctrl-C stopped, as in shells."""

MAX_NAMES = 40
"""Known names that an error lists."""
MAKE_ROOM = "make room on the disk, then try again (a run: with --resume)"
FILE_ADVICE = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose a path that can be written",
    errno.EEXIST: "choose another path",
    errno.ENOTDIR: "choose another path",
    errno.EISDIR: "name a file",
    errno.ENOENT: "create it, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""The advice on a failure of the file system."""


class FedslrError(ValueError):
    """A request that fedslr cannot carry out. The message is one line; the command line exits with code 2."""


class WireError(FedslrError):
    """A message between client and server that is truncated, too large, malformed or not finite."""


class CheckpointError(FedslrError):
    """A checkpoint that fedslr cannot write or read."""


class StorageError(CheckpointError):
    """A failure of the disk, such as a full disk or missing permissions. The file itself is not damaged."""


class TakenError(FedslrError):
    """A folder that another process uses."""


class FedslrWarning(UserWarning):
    """Advice about a request that fedslr carries out nevertheless."""


class Interrupted(FedslrError):
    """A run that stopped on request, after it saved its last finished round."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return advice on an unknown name: the nearest known name, or all known names."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names[:MAX_NAMES]) or 'none'}{more}"


def reason(error: BaseException) -> str:
    """Return why something failed, in one line; a failure of the operating system without its number."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def file_reason(error: OSError) -> str:
    """Return why a file could not be used, and what to do."""
    return f"{reason(error)}; {FILE_ADVICE.get(error.errno or 0, 'correct that, then try again')}"


def show_traceback(error: BaseException) -> None:
    """Print the traceback of an error if the environment variable `FEDSLR_TRACEBACK` is set."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
