"""What a node keeps on its disk, so that it can be killed at any moment.

    STORE/
      page.json                     the run, the client, the head of its chain, and the names of the files that count
      state-000012.safetensors      the client's state, everything booked that was counted
      trained-000013.safetensors    an upload that waits: the state after its training, its ledger not yet booked,
      upload-000013.bin             and the very bytes that were, or will be, sent
      start-000001.safetensors      the initial model
      personal-000014.safetensors   the personal model of the last evaluation, for `fedslr predict`
      parts-000014.bin              and what it is made of, factors and non-zeros, for `fedslr export`

Files are never changed. New ones are written first, then the page is renamed into place: that is the one moment in
which anything happens. What no page names is removed.
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
OURS = re.compile(
    r"\.?(start|state|trained|upload|personal|parts)-\d+\.(safetensors|bin)(\.\d+\.tmp)?|\.page\.json\.\d+\.tmp"
)


@dataclass(frozen=True)
class Pending:
    """An upload whose fate the node does not know yet."""

    round: int
    attempt: int
    base: str
    """Digest of the broadcast it was trained from."""
    digest: str
    trained: Entry
    upload: Entry


@dataclass(frozen=True)
class Page:
    """All that counts of a node, at one moment."""

    run: str
    client: int
    recipe: str
    head: str
    start: Entry
    state: Entry
    pending: Pending | None = None
    personal: Entry | None = None
    parts: Entry | None = None
    evaluation: tuple[int, float, int] | None = None
    """Of that model: the rounds that were done, its accuracy, and the samples it was tested on."""
    inputs: str = ""
    """And of what kind, see `messages`."""
    seen: tuple[int, int] = (0, 0)
    """Round and attempt of the latest order."""
    serial: int = 0
    """How many pages came before."""

    def files(self) -> set[str]:
        waiting = (self.pending.trained, self.pending.upload) if self.pending else ()
        return {e.file for e in (self.start, self.state, self.personal, self.parts, *waiting) if e is not None}


class NodeStore:
    """The files of one node. `read` says where it stands; each `turn` is one atomic step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> Page | None:
        """The page, if there is one; a CheckpointError if it is damaged, a StorageError if it cannot be had."""
        path = self.folder / PAGE
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}; it is left as it is") from error
        try:
            fields = json.loads(written)
            if fields.pop("digest") != _digest(fields):
                raise ValueError("its digest does not match")
            if (version := fields.pop("format")) != FORMAT:
                raise FedslrError(
                    f"{path} is of another version of fedslr (format {version}, not {FORMAT}); run that one, or give "
                    "this node another store"
                )
            return _page(fields)
        except FedslrError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error}; move {self.folder} away, the server restores"
            ) from error

    def write(self, page: Page | None, kind: str, tree: Tree) -> Entry:
        """A new file; it counts from the next turn on."""
        return write_tree(self._path(page, kind, "safetensors"), tree, write_whole)

    def write_bytes(self, page: Page | None, kind: str, data: bytes) -> Entry:
        path = self._path(page, kind, "bin")
        write_whole(path, data)
        return Entry(path.name, hashlib.sha256(data).hexdigest())

    def turn(self, page: Page) -> Page:
        """From here on this page counts, and only what it names is kept."""
        page = replace(page, serial=page.serial + 1)
        fields = {"format": FORMAT, **asdict(page)}
        sync_folder(self.folder)
        write_durably(self.folder / PAGE, json.dumps({**fields, "digest": _digest(fields)}, indent=1).encode())
        self._tidy(page.files())
        return page

    def set_aside(self, names: Iterable[str] | None = None) -> Path:
        """Put damaged files, or all there are, where nobody removes them."""
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

    def personal(self, entry: Entry) -> Tree:
        """The personal model of the last evaluation."""
        try:
            return self.tree(entry)
        except CheckpointError as error:
            raise FedslrError(f"{error}; the federation's next evaluation writes the model anew") from error

    def bytes(self, entry: Entry) -> bytes:
        return read_verified(self.folder, entry)

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
    pending = fields["pending"]
    if pending is not None:
        pending = Pending(**{**pending, "trained": Entry(*pending["trained"]), "upload": Entry(*pending["upload"])})
    kept = {name: fields.get(name) for name in ("personal", "parts")}
    evaluation = fields.get("evaluation")
    return Page(
        **{
            **fields,
            "start": Entry(*fields["start"]),
            "state": Entry(*fields["state"]),
            **{name: None if entry is None else Entry(*entry) for name, entry in kept.items()},
            "evaluation": None if evaluation is None else tuple(evaluation),
            "pending": pending,
            "seen": tuple(fields["seen"]),
        }
    )
