"""Writing of files that survive a crash and a power cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedslr.core.errors import StorageError, file_reason

Bytes = bytes | memoryview


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that renames in it survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, *pieces: Bytes) -> None:
    """Write a file completely or not at all; it survives a power cut."""
    write_whole(path, *pieces)
    with disk_errors(path):
        sync_folder(path.parent)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of a write to `path` into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {file_reason(error)}") from error


def write_whole(path: Path, *pieces: Bytes) -> None:
    """Write a file completely or not at all; it survives a power cut after `sync_folder` of its folder.

    The file is written under a temporary name, flushed and renamed.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with beside.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
