"""Decoded datasets on the disk, so that images are decoded once.

    ROOT/.fedslr-cache/cifar10/
      manifest.json               names every array's file with its SHA-256, and what it was made from
      x-1f0c53a97be2d840.npy …    named by its SHA-256, so that two processes that make it make the same file

Array files are written first and the manifest last; each is flushed and renamed into place. A cache is used only if its
sources have the names, sizes and times they had and every byte is as it was written; otherwise it is made again. If
nothing can be written, datasets are decoded each time.
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
from typing import Any

import numpy as np

from fedslr.core.durable import sync_folder, write_durably
from fedslr.core.errors import StorageError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

CACHE_FOLDER = ".fedslr-cache"
MANIFEST = "manifest.json"
ABANDONED_SECONDS = 3600
"""The age from which a half-written file belongs to a process that was killed."""

_bypassed: ContextVar[bool] = ContextVar("bypassed", default=False)


@contextmanager
def bypass() -> Iterator[None]:
    """Read datasets from their own files, even if their decoded arrays are cached."""
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


def load_or_decode(root: Path, name: str, base: Path, files: Iterable[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `decode` makes of the files, from ROOT's cache from the second time on.

    Files are identified by their paths relative to `base`, so that a dataset can be moved as a whole.
    """
    home = root / CACHE_FOLDER / name
    sources = None if _bypassed.get() else _source_digest(base, files)
    if sources is None:
        return decode()
    found = _load(home, sources)
    if found is not None:
        return found
    arrays = decode()
    if not _save(home, sources, arrays):
        return arrays
    # Mapped from the disk, the decoded arrays need not stay in memory.
    return _load(home, sources) or arrays


def _source_digest(base: Path, files: Iterable[Path]) -> str | None:
    """Return a digest of the sources' names, sizes and times; None if a source is missing, which `decode` reports."""
    digest = hashlib.sha256()
    # `relative_to` would take a second for a hundred thousand files.
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


def _load(home: Path, sources: str) -> Arrays | None:
    """Return the cached arrays if they were made from these sources and are undamaged."""
    try:
        manifest = json.loads((home / MANIFEST).read_bytes())
        if manifest["sources"] != sources:
            return None
        digests: dict[str, str] = manifest["sha256"]
        paths = {name: _array_path(home, name, digest) for name, digest in digests.items()}
        with ThreadPoolExecutor() as pool:
            if list(pool.map(_sha256, paths.values())) != list(digests.values()):
                return None
        # Pages of a mapped file are read when they are used. Mode "c" keeps what is written to them out of the file.
        return {name: np.load(path, mmap_mode="c", allow_pickle=False) for name, path in paths.items()}
    except Exception:  # Whatever is wrong with a cache, it can be made again.
        return None


def _array_path(home: Path, name: str, sha256: str) -> Path:
    return home / f"{name}-{sha256[:16]}.npy"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- writing --------------------------------------------------------------------------------------------------------


def _save(home: Path, sources: str, arrays: Arrays) -> bool:
    """Write arrays and their manifest; return False if the disk refuses."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        digests = {name: _write(home, name, array) for name, array in arrays.items()}
        sync_folder(home)
        write_durably(home / MANIFEST, json.dumps({"sources": sources, "sha256": digests}, indent=1).encode())
        _remove_unused(home, {_array_path(home, *entry) for entry in digests.items()})
    except (OSError, StorageError):
        return False
    return True


def _write(home: Path, name: str, array: Array) -> str:
    """Write an array's file; return its SHA-256."""
    temporary = home / f".{name}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        sha256 = _sha256(temporary)
        temporary.replace(_array_path(home, name, sha256))
    finally:
        temporary.unlink(missing_ok=True)
    return sha256


def _remove_unused(home: Path, used: set[Path]) -> None:
    """Remove the files of an earlier cache, and half-written files of killed processes."""
    for path in home.iterdir():
        with contextlib.suppress(OSError):
            abandoned = path.suffix == ".tmp" and time.time() - path.stat().st_mtime > ABANDONED_SECONDS
            if abandoned or (path.suffix == ".npy" and path not in used):
                path.unlink()
