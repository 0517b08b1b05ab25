"""Decoded datasets on the disk, so that images are decoded once.

    ROOT/.fedslr-cache/cifar10/
      manifest.json               names every array's file with its SHA-256 and size, and what it was made from
      x-1f0c53a97be2d840.npy …    named by its SHA-256, so that two processes that make it make the same file

Files are written first, the manifest last, each flushed and renamed into place. A cache is believed only if its sources
have the names, sizes and times they had and every byte is what it was; else it is made again. Where nothing can be
written, everything works without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fedslr.core.durable import sync_folder, write_durably
from fedslr.core.errors import CheckpointError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

FORMAT = 2
FOLDER = ".fedslr-cache"
MANIFEST = "manifest.json"
STALE = 3600
"""Seconds after which a half-written file has nobody left who writes it."""
TYPES = {"uint8", "int64", "float32", "float64"}

_ignored: ContextVar[bool] = ContextVar("ignored", default=False)


class Entry(NamedTuple):
    """An array's file, the SHA-256 of its bytes and how many there are."""

    file: str
    sha256: str
    size: int


@contextmanager
def ignored() -> Iterator[None]:
    """Read datasets from their own files, whatever is kept of them."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


def kept(root: Path, name: str, base: Path, files: Iterable[Path], decode: Callable[[], Arrays]) -> Arrays:
    """The arrays that `decode` makes of the files, in ROOT's cache from the second time on.

    Files are known by their names from `base` on, so a dataset can be moved as a whole.
    """
    home = root / FOLDER / name
    key = None if _ignored.get() else _key(base, files)
    if key is None:
        return decode()
    found = _load(home, key)
    if found is not None:
        return found
    arrays = decode()
    if not _save(home, key, arrays):
        return arrays
    # From the disk again: what was decoded need not stay in memory.
    return _load(home, key) or arrays


def _key(base: Path, files: Iterable[Path]) -> str | None:
    """Names, sizes and times of the sources in one number; None if they cannot be looked at."""
    digest = hashlib.sha256()
    # What `relative_to` does, which takes a second for a hundred thousand files.
    start = len(os.fsencode(base / "_")) - 1
    try:
        for path in files:
            found = path.stat()
            digest.update(os.fsencode(path)[start:])
            digest.update(f"\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    except OSError:
        return None
    return digest.hexdigest()


# --- reading --------------------------------------------------------------------------------------------------------


def _load(home: Path, key: str) -> Arrays | None:
    """What is kept, if it was made from these sources and is whole."""
    try:
        fields = json.loads((home / MANIFEST).read_bytes())
        if fields["format"] != FORMAT or fields["key"] != key:
            return None
        entries = {str(name): Entry(**entry) for name, entry in fields["arrays"].items()}
        with ThreadPoolExecutor() as pool:
            whole = pool.map(lambda entry: _is_whole(home, entry), entries.values())
            if not all(whole):
                return None
        arrays = {name: _open(home / entry.file) for name, entry in entries.items()}
    except Exception:  # whatever is wrong with it, it can be made again
        return None
    return arrays if _fit_together(arrays) else None


def _is_whole(home: Path, entry: Entry) -> bool:
    path = home / entry.file
    if Path(entry.file).name != entry.file or path.stat().st_size != entry.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _open(path: Path) -> Array:
    """The array of a file, mapped: a page of it is read when it is used.

    Pages are private: torch takes no memory it must not write to, and what is written never reaches the file.
    """
    array = np.load(path, mmap_mode="c", allow_pickle=False)
    if not isinstance(array, np.ndarray) or array.dtype.name not in TYPES or not array.flags.c_contiguous:
        raise ValueError(f"{path} is no array of a dataset")
    return array


def _fit_together(arrays: Arrays) -> bool:
    parts = (("x", "y"), ("x_test", "y_test"))
    return all(x in arrays and y in arrays and arrays[y].shape == (len(arrays[x]),) for x, y in parts)


# --- writing --------------------------------------------------------------------------------------------------------


def _save(home: Path, key: str, arrays: Arrays) -> bool:
    """Keep arrays; False where that cannot be done."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        entries = {name: _write(home, name, array) for name, array in arrays.items()}
        sync_folder(home)
        fields = {"format": FORMAT, "key": key, "arrays": {name: e._asdict() for name, e in entries.items()}}
        write_durably(home / MANIFEST, json.dumps(fields, indent=1).encode())
        _tidy(home, {e.file for e in entries.values()})
    except (OSError, CheckpointError):
        return False
    return True


class _Hashed:
    """A file that knows the SHA-256 of what was written to it: large arrays pass once, in pieces."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _write(home: Path, name: str, array: Array) -> Entry:
    beside = home / f".{name}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with beside.open("wb") as file:
            hashed = _Hashed(file)
            np.save(hashed, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        sha256 = hashed.digest.hexdigest()
        path = home / f"{name}-{sha256[:16]}.npy"
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    return Entry(path.name, sha256, size)


def _tidy(home: Path, named: set[str]) -> None:
    """Remove what an earlier cache had, and what somebody who was killed left half written."""
    for path in home.iterdir():
        with contextlib.suppress(OSError):
            old = path.suffix == ".tmp" and time.time() - path.stat().st_mtime > STALE
            if old or (path.suffix == ".npy" and path.name not in named):
                path.unlink()
