"""Decoded datasets on the disk, so that images are decoded once.

    ROOT/.fedslr-cache/cifar10/3f0c53a97be2d840/x.npy, y.npy, …

The inner folder is named by a digest of the names, sizes and times of the source files, so changed sources are decoded
again. The folder is written and flushed under a temporary name and then renamed: it is complete or missing. If the disk
refuses to be written, the dataset is decoded each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.durable import sync_folder

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

CACHE_FOLDER = ".fedslr-cache"

_bypassed: ContextVar[bool] = ContextVar("bypassed", default=False)


@contextmanager
def bypass() -> Iterator[None]:
    """Read datasets from their own files within the block, even if their decoded arrays are cached."""
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


def load_or_decode(root: Path, name: str, base: Path, files: Iterable[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `decode` makes of the files; after the first time, read them from the cache under `root`.

    Files are identified by their paths relative to `base`, so that a dataset can be moved as a whole.
    """
    digest = None if _bypassed.get() else _source_digest(base, files)
    if digest is None:
        return decode()
    folder = root / CACHE_FOLDER / name / digest
    if found := _load(folder):
        return found
    arrays = decode()
    with contextlib.suppress(OSError):
        _save(folder, arrays)
    # Mapped from the disk, the decoded arrays need not stay in memory.
    return _load(folder) or arrays


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
    return digest.hexdigest()[:16]


def _load(folder: Path) -> Arrays:
    """Return the cached arrays by name; return no arrays if the cache is missing or damaged."""
    try:
        # Pages of a mapped file are read when they are used. Mode "c" keeps changes of the arrays out of the file.
        return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in folder.glob("*.npy")}
    except (OSError, ValueError, EOFError):
        return {}


def _save(folder: Path, arrays: Arrays) -> None:
    """Write the arrays' folder, in place of any other folder of this dataset."""
    scratch = folder.with_name(uuid.uuid4().hex)
    try:
        scratch.mkdir(parents=True)
        for name, array in arrays.items():
            with (scratch / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(scratch)
        # The others belong to changed sources, to processes that were killed, or are damaged.
        for other in folder.parent.iterdir():
            if other != scratch:
                shutil.rmtree(other, ignore_errors=True)
        scratch.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
