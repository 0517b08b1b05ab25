"""The files of a node. The node can be killed at any moment without damage to them.

    STORE/
      page.json                     the run, the client, the head of its chain, and the names of the files that count
      state-000012.safetensors      the client's state and its ledger, with every counted upload booked
      upload-000013.bin             the pending upload, which the server may have counted or not
      address-000013.bin            the address that is sent with it
      trained-000013.safetensors    the client's state after the training that made the upload
      broadcast-000013.bin          the payload of that round, until the personal part is trained with it too
      start-000001.safetensors      the initial model
      personal-000014.safetensors   the personal model of the last evaluation, for `fedslr predict`
      parts-000014.bin              its parts, with factors and non-zeros, for `fedslr export`

The node never changes a file. It writes new files first and then renames the new page into place. Before the renaming
the old files count, afterwards the new ones. The node removes files that the page does not name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedslr.core.durable import disk_errors, sync_folder, write_durably, write_whole
from fedslr.core.errors import CheckpointError, FedslrError, StorageError
from fedslr.core.tree import Tree
from fedslr.storage.tree_files import Entry, read_tree, read_verified, write_tree

FORMAT = 1
PAGE = "page.json"
FILE_KINDS = ("start", "state", "trained", "upload", "address", "broadcast", "personal", "parts")
OURS = re.compile(rf"\.?({'|'.join(FILE_KINDS)})-\d+\.(safetensors|bin)(\.\d+\.tmp)?|\.page\.json\.\d+\.tmp")
"""The names of the files that a node makes; it never touches other files."""


@dataclass(frozen=True)
class Pending:
    """The pending upload, which the server may have counted or not."""

    round: int
    attempt: int
    base: str
    """Digest of the payload that the client trained from."""
    digest: str
    trained: Entry
    """The client's state after its training, which includes the personal part if `broadcast` is None."""
    upload: Entry | None
    """The bytes of the upload; None for an empty upload."""
    address: Entry | None
    broadcast: Entry | None
    """The payload, if the personal part is not trained yet."""


@dataclass(frozen=True)
class Evaluated:
    """The personal model of the last evaluation."""

    personal: Entry
    parts: Entry | None
    rounds: int
    """The number of rounds that were done."""
    score: float | None
    """The headline metric of the personal model."""
    tested: int
    """The number of test samples."""
    inputs: str
    """The kind of the inputs, see `messages`."""


@dataclass(frozen=True)
class Page:
    """The state of a node at one moment: its facts, and its files by name and digest."""

    run: str
    client: int
    recipe: str
    head: str
    start: Entry
    state: Entry
    pending: Pending | None = None
    evaluated: Evaluated | None = None
    seen: tuple[int, int] = (0, 0)
    """The round and the attempt of the latest order."""
    serial: int = 0
    """The number of earlier pages."""

    def files(self) -> set[str]:
        """Return the names of the files that count."""
        parts = [vars(part) for part in (self, self.pending, self.evaluated) if part is not None]
        return {value.file for part in parts for value in part.values() if isinstance(value, Entry)}


class NodeStore:
    """The files of one node. `read` returns the current page, and `turn` replaces it in one atomic step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> Page | None:
        """Return the current page, or None if there is none.

        Raises:
            StorageError: The page cannot be read, for example because of its permissions.
            CheckpointError: The page is damaged.
        """
        path = self.folder / PAGE
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}; the node changes nothing there") from error
        try:
            fields = json.loads(written)
            if fields.pop("digest") != _digest(fields):
                raise ValueError("its digest does not match")
            version = fields.pop("format")
            if version == FORMAT:
                return _page(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; the server restores the ledger") from error
        raise FedslrError(
            f"{path} has format {version}, but this version of fedslr reads format {FORMAT}; install the version that "
            "wrote it, or give this node another store"
        )

    def write(self, page: Page | None, kind: str, tree: Tree) -> Entry:
        """Write a tree to a new file, which counts from the next turn on."""
        return write_tree(self._path(page, kind, "safetensors"), tree, write_whole)

    def write_bytes(self, page: Page | None, kind: str, data: bytes) -> Entry | None:
        """Write bytes to a new file, which counts from the next turn on; write no file if there are no bytes."""
        if not data:
            return None
        path = self._path(page, kind, "bin")
        write_whole(path, data)
        return Entry(path.name, hashlib.sha256(data).hexdigest())

    def turn(self, page: Page) -> Page:
        """Replace the current page, and keep only the files that the new page names."""
        page = replace(page, serial=page.serial + 1)
        fields = {"format": FORMAT, **asdict(page)}
        sync_folder(self.folder)
        write_durably(self.folder / PAGE, json.dumps({**fields, "digest": _digest(fields)}, indent=1).encode())
        self._tidy(page.files())
        return page

    def set_aside(self, names: Iterable[str] | None = None) -> Path:
        """Move damaged files, or all files, to a new folder; return the folder."""
        there = [path.name for path in self.folder.iterdir() if path.name == PAGE or OURS.fullmatch(path.name)]
        number = 1 + sum(1 for _ in self.folder.glob("damaged-*"))
        aside = self.folder / f"damaged-{number}"
        with disk_errors(aside):
            aside.mkdir()
            for name in there if names is None else names:
                (self.folder / name).rename(aside / name)
        return aside

    def tree(self, entry: Entry) -> Tree:
        return read_tree(self.folder, entry)

    def last_evaluation(self) -> tuple[Page, Evaluated, Tree]:
        """Return the page, its facts about the last evaluation, and the personal model."""
        page = self.read()
        if page is None or page.evaluated is None:
            lack = "has no personal model yet; wait for the first evaluation"
            if page is None:
                lack = "is no node's store; name the folder that `store` in the SuperNode's --node-config names"
            raise FedslrError(f"{self.folder}: {lack}")
        try:
            return page, page.evaluated, self.tree(page.evaluated.personal)
        except CheckpointError as error:
            raise FedslrError(f"{error}; the federation's next evaluation writes the model anew") from error

    def bytes(self, entry: Entry | None) -> bytes:
        return b"" if entry is None else read_verified(self.folder, entry)

    def _path(self, page: Page | None, kind: str, suffix: str) -> Path:
        serial = 1 if page is None else page.serial + 1
        return self.folder / f"{kind}-{serial:06d}.{suffix}"

    def _tidy(self, named: set[str]) -> None:
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name) and path.name not in named:
                with contextlib.suppress(OSError):
                    path.unlink()


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _page(fields: dict[str, Any]) -> Page:
    for name, kind in (("pending", Pending), ("evaluated", Evaluated)):
        if fields[name] is not None:
            fields[name] = kind(**_with_entries(fields[name]))
    return Page(**{**_with_entries(fields), "seen": tuple(fields["seen"])})


def _with_entries(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with entries in place of the lists that JSON has for them."""
    return {
        name: Entry(*value) if name in FILE_KINDS and value is not None else value for name, value in fields.items()
    }
