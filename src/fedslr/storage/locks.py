"""Locks on run folders. Without `fcntl`, as on Windows, a folder can be taken twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedslr.core.errors import FedslrError, TakenError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


def _flock(handle: IO[Any], shared: bool, wait: bool) -> None:
    """Lock an open file; raise a BlockingIOError if another process holds it."""
    if fcntl is not None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)


def lock(folder: Path, shared: bool = False, wait: bool = False, mode: int = 0o777, called: str = "out") -> IO[str]:
    """Make a folder and take it for this process; the lock is released when the returned file is closed.

    Args:
        folder: The folder; it gets a file `.lock`.
        shared: Let other processes take the folder too, if they share it as well.
        wait: Wait for a process that holds the folder instead of refusing.
        mode: The permissions of a new folder.
        called: The name of the option that gave the folder, for error messages.
    """
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        raise FedslrError(f"{called}: cannot write to {folder}: {error.strerror}; choose another folder") from error
    try:
        _flock(handle, shared, wait)
    except OSError:
        handle.close()
        raise TakenError(f"{called}: another process is running in {folder}; wait for it or choose another") from None
    return handle


def share(handle: IO[str]) -> None:
    """Let other processes share a folder that this process has taken."""
    _flock(handle, shared=True, wait=False)


def is_taken(folder: Path) -> bool:
    """Return whether a process works in a folder, as far as it can be read; nothing is written."""
    for mode in ("r+b", "rb"):  # network file systems may lock only files that are open for writing
        try:
            with (folder / ".lock").open(mode) as handle:
                _flock(handle, shared=False, wait=False)
                return False
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Take a folder for the block."""
    with lock(folder):
        yield
