"""Lock run folders, so that one run at a time writes to them."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO, Any

from fedslr.core.errors import FedslrError, TakenError


def _flock(handle: IO[Any], shared: bool, wait: bool) -> None:
    """Lock an open file; raise a BlockingIOError if another process holds the lock."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)


def lock(folder: Path, shared: bool = False, wait: bool = False, mode: int = 0o777, called: str = "out") -> IO[str]:
    """Create a folder if needed and lock it for this process. Closing the returned file releases the lock.

    Args:
        folder: The folder. The lock is a file `.lock` in it.
        shared: Let other processes that also pass `shared` lock the folder too.
        wait: Wait for a process that holds the lock instead of raising an error.
        mode: The permissions of a new folder.
        called: The name of the option that gave the folder, for error messages.

    Raises:
        FedslrError: The folder cannot be written.
        TakenError: Another process holds the lock.
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
    """Let other processes share a folder that this process has locked."""
    _flock(handle, shared=True, wait=False)


def is_taken(folder: Path) -> bool:
    """Return whether another process holds the lock of a folder. Write nothing; return False if it cannot be read."""
    for mode in ("r+b", "rb"):  # Some network file systems lock only files that are open for writing.
        try:
            with (folder / ".lock").open(mode) as handle:
                _flock(handle, shared=False, wait=False)
                return False
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False
