"""Write trees of tensors to files, and verify their SHA-256 when reading them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from fedslr.channel import encoding, packing
from fedslr.core import factored
from fedslr.core.durable import write_durably
from fedslr.core.errors import CheckpointError, StorageError
from fedslr.core.machine import cores
from fedslr.core.tree import Tree

MAX_THREADS = 8
"""The most threads that read or write files; fewer on a machine with fewer cores."""


class Entry(NamedTuple):
    """A file and the SHA-256 of its bytes."""

    file: str
    sha256: str


def write_tree(path: Path, tree: Tree, write: Callable[..., None] = write_durably) -> Entry:
    """Write a tree to a safetensors file, every leaf in its smallest encoding."""
    pieces = packing.pack(factored.to_host(tree)).pieces()
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    write(path, *pieces)
    return Entry(path.name, digest.hexdigest())


def read_verified(folder: Path, entry: Entry) -> bytes:
    """Return the bytes of a file; raise an error if the file was changed or is missing."""
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        kind = CheckpointError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CheckpointError(f"{path} was changed or only partly written: its SHA-256 does not match")
    return data


def verify(folder: Path, entries: Iterable[Entry]) -> None:
    """Read files in parallel; raise an error if one was changed or is missing."""

    def read(share: list[Entry]) -> None:
        for entry in share:
            read_verified(folder, entry)

    everything, count = list(entries), threads()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(read, [everything[i::count] for i in range(count)]))


def threads() -> int:
    """Return the number of threads that read or write files."""
    return min(MAX_THREADS, cores())


def read_tree(folder: Path, entry: Entry, device: torch.device | str = "cpu") -> Tree:
    """Return the tree in a file; raise an error if the file was changed or is missing."""
    data = read_verified(folder, entry)
    return factored.to_device(packing.unpack(encoding.load_arrays(data), max_numbers=packing.NO_LIMIT), device)
