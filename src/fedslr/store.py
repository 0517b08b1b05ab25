"""Where client state lives: in memory or on disk. The same store serves simulation and deployment.

A state is a plain tree (see `plain`). Whatever is kept on disk is one safetensors file per client and version, never
changed once written, so the files of an older checkpoint stay as they are while newer ones are made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.numpy
import torch

from fedslr import wire
from fedslr.errors import CheckpointError
from fedslr.tree import Tree

OURS = re.compile(r"client-\d+-\d+\.safetensors|\.client-\d+-\d+\.safetensors\.\d+\.tmp")
"""Names of the files a store makes; it never touches another."""


class Entry(NamedTuple):
    """A file and the SHA-256 of its bytes."""

    file: str
    sha256: str


# --- durable files --------------------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """All of the file or none of it: write beside it, flush to the disk, rename over it, flush the folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot write {path}: {reason}; make room, then resume") from error


def write_tree(path: Path, tree: Tree) -> Entry:
    """A tree as a safetensors file, sparse and low-rank parts in their small form."""
    data = safetensors.numpy.save(wire.pack(tree).arrays)
    write_durably(path, data)
    return Entry(path.name, hashlib.sha256(data).hexdigest())


def read_verified(folder: Path, entry: Entry) -> bytes:
    """The bytes of a file, if they are what they were."""
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise CheckpointError(f"{path} was changed or only half written: its SHA-256 does not match")
    return data


def read_tree(folder: Path, entry: Entry, device: torch.device | str = "cpu") -> Tree:
    """The tree of a file whose bytes are what they were."""
    data = read_verified(folder, entry)
    return wire.to_device(wire.unpack(wire.load_arrays(data), max_numbers=2**62), device)


# --- states as plain trees ------------------------------------------------------------------------------------------


def plain(state: tuple[Any, ...]) -> Tree:
    """A NamedTuple of Params as a tree that can be written."""
    return dict(state._asdict()) if hasattr(state, "_asdict") else {}


def restore(kind: type[Any], tree: Tree) -> Any:
    """The NamedTuple of `plain`; the empty tuple for a method that keeps nothing."""
    return kind(**tree) if hasattr(kind, "_fields") else ()


# --- stores ---------------------------------------------------------------------------------------------------------


class ClientStore(ABC):
    """The state of every client that has trained; the others are still as they began.

    `save` makes what was put durable and gives the files of all clients, for a checkpoint to name. A file is removed as
    soon as no checkpoint that is kept names it.
    """

    def __init__(self, folder: Path | None = None, device: torch.device | str = "cpu") -> None:
        self.folder = folder
        self.device = device
        self.entries: dict[int, Entry] = {}
        self._files: set[str] = set()
        self._named: set[str] = set()

    @abstractmethod
    def get(self, client: int) -> Tree | None:
        """A client's state; None if it never trained."""

    @abstractmethod
    def put(self, client: int, state: Tree, version: int) -> None:
        """Replace a client's state; the version (a round) must grow."""

    def save(self, version: int) -> dict[int, Entry]:
        """Make every state durable; the files that hold them."""
        return self.entries

    def collect(self, named: set[str]) -> None:
        """After a checkpoint: remove the files that no kept checkpoint names any more."""
        self._named = named
        self._remove(self._files - named - {e.file for e in self.entries.values()})

    def load(self, entries: Mapping[int, Entry], named: set[str]) -> None:
        """Go back to the states a checkpoint names; `named` are the files of all checkpoints that are kept."""
        self.entries = dict(entries)
        self._files = {path.name for path in self._home().iterdir() if OURS.fullmatch(path.name)}
        self.collect(named)

    def _remove(self, names: set[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._home().joinpath(name).unlink()
        self._files -= names

    def _home(self) -> Path:
        if self.folder is None:
            raise CheckpointError("this store has no folder to save to")
        return self.folder

    def _write(self, client: int, state: Tree, version: int) -> None:
        old = self.entries.get(client)
        new = write_tree(self._home() / f"client-{client:06d}-{version:06d}.safetensors", state)
        self.entries[client] = new
        self._files.add(new.file)
        if old is not None and old.file != new.file and old.file not in self._named:
            self._remove({old.file})


class MemoryStore(ClientStore):
    """All states in memory; changed ones are written when a checkpoint is made."""

    def __init__(self, folder: Path | None = None, device: torch.device | str = "cpu") -> None:
        super().__init__(folder, device)
        self._states: dict[int, Tree] = {}
        self._changed: set[int] = set()

    def get(self, client: int) -> Tree | None:
        return self._states.get(client)

    def put(self, client: int, state: Tree, version: int) -> None:
        self._states[client] = state
        self._changed.add(client)

    def save(self, version: int) -> dict[int, Entry]:
        for client in sorted(self._changed):
            self._write(client, self._states[client], version)
            self._changed.discard(client)
        return self.entries

    def load(self, entries: Mapping[int, Entry], named: set[str]) -> None:
        super().load(entries, named)
        self._states = {c: read_tree(self._home(), e, self.device) for c, e in entries.items()}
        self._changed = set()


class DiskStore(ClientStore):
    """Only the states in use are in memory: every state is written when it is put and read when it is needed."""

    def get(self, client: int) -> Tree | None:
        entry = self.entries.get(client)
        return None if entry is None else read_tree(self._home(), entry, self.device)

    def put(self, client: int, state: Tree, version: int) -> None:
        self._write(client, state, version)


STORES: dict[str, type[ClientStore]] = {"memory": MemoryStore, "disk": DiskStore}
