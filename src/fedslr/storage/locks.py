"""Locks on run folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fedslr.core.errors import FedslrError, TakenError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def lock(folder: Path, shared: bool = False, wait: bool = False, mode: int = 0o777, called: str = "out") -> IO[str]:
    """Take a folder for this process, or for several; the lock goes with the file that is returned.

    `called` is what the folder is to whoever named it.
    """
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        raise FedslrError(f"{called}: cannot write to {folder}: {error.strerror}; choose another folder") from error
    if fcntl is not None:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise TakenError(f"out: another process is running in {folder}; wait for it or choose another") from None
    return handle


def is_taken(folder: Path) -> bool:
    """Whether a process works in a folder, as far as it can be looked into: nothing is written there."""
    for mode in ("r+b", "rb"):  # a network's disk may lock only what can be written
        try:
            with (folder / ".lock").open(mode) as handle:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    with lock(folder):
        yield
