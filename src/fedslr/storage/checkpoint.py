"""Checkpoints: atomic, verified, resumable. A saved round is never lost.

    checkpoint/
      manifest-000012.json        names every file of the generation with its SHA-256, and its own digest
      server-000012.safetensors   the server's state and the initial model
      index-000010.json           where there are many clients: the files of all of them at an earlier round
      clients/client-000003-000011.safetensors …

A manifest names the files of the clients that changed since its index, so that a checkpoint costs what trained since
the last one, however many clients there are. Files are written first, the manifest last, each flushed and renamed into
place; two generations are kept. A generation is believed only if its manifest and every file it names are unchanged;
else the one before it is used. Shuffles, cohorts and batches are drawn from (seed, round, client), so no generator's
state has to be kept. A client that did not train between two generations has one file that both name: damage to it is
damage to both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedslr.core.durable import disk_errors, sync_folder, write_durably
from fedslr.core.errors import CheckpointError
from fedslr.core.group import Group
from fedslr.core.tree import Tree
from fedslr.storage.client_store import ClientStore
from fedslr.storage.run_folder import LEDGER
from fedslr.storage.tree_files import Entry, read_tree, read_verified, verify, write_tree

FORMAT = 1
KEPT_GENERATIONS = 2
"""The checkpoints that are kept on the disk."""
MAX_CLIENTS_IN_MANIFEST = 1000
"""The most clients in a manifest; the files of more clients are put into an index."""
CHECKPOINT_FILE = re.compile(
    r"server-\d+\.safetensors|index-\d+\.json|\.(server|manifest|index)-\d+\.(safetensors|json)\.\d+\.tmp"
)
"""The names of files that an interrupted save may leave behind."""


@dataclass
class Generation:
    """Everything a run needs to go on after `rounds` finished rounds."""

    rounds: int
    server: Entry
    clients: dict[int, Entry]
    notes: dict[str, Any] = field(default_factory=dict)
    """Small facts of the run: how long metrics.jsonl was, seconds spent."""
    index: Entry | None = None
    listed: dict[int, Entry] = field(default_factory=dict)
    """The clients that changed since the index: `clients` is both, put together."""


def _by_client(entries: dict[str, Any]) -> dict[int, Entry]:
    return {int(client): Entry(*entry) for client, entry in entries.items()}


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


NO_CHECKPOINT = "{}: no checkpoint in it, so there are no models; expected a run's own folder"
DEPLOYED = "{}: a deployed federation, whose models are exported: fedslr export RUN --global, or STORE on a node"


def require_checkpoint(run: Path) -> Path:
    """Return the folder of a run's checkpoints; refuse a folder without them."""
    if not (run / "checkpoint").is_dir():
        raise CheckpointError((DEPLOYED if (run / LEDGER).exists() else NO_CHECKPOINT).format(run))
    return run / "checkpoint"


class Checkpoints:
    """The generations in a run's `checkpoint/` folder.

    Of several processes each writes the files of its own clients, and the first writes the rest when all have done so.
    """

    def __init__(self, folder: Path, group: Group | None = None) -> None:
        self.folder = folder
        self.group = group or Group()
        self.clients = folder / "clients"
        self._entries: dict[int, Entry] = {}
        """Every client's file."""
        self._index: Entry | None = None
        self._listed: dict[int, Entry] = {}
        self._indices: dict[int, str | None] = {}
        self._replaced: dict[int, set[str]] = {}
        """By generation: its clients' files that are of no later one."""
        with disk_errors(self.clients):
            self.clients.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        """Return the rounds of all generations, newest first."""
        found = (re.fullmatch(r"manifest-(\d+)\.json", p.name) for p in self.folder.iterdir())
        return sorted((int(m.group(1)) for m in found if m), reverse=True)

    def save(self, rounds: int, server: Tree, store: ClientStore, notes: dict[str, Any]) -> None:
        """Write a generation; an older one stays whole even if the process is killed meanwhile."""
        store.save()
        fresh = {c: e for part in self.group.gather(dict(store.fresh)) for c, e in part.items()}
        self._entries |= fresh
        if self.group.first:
            self._write(rounds, server, fresh, notes)
        self.group.wait()
        if self._indices:
            before = max(self._indices)
            self._replaced[before] = store.replaced.difference(*self._replaced.values())
        self._indices[rounds] = None if self._index is None else self._index.file
        for old in sorted(self._indices)[:-KEPT_GENERATIONS]:
            self._remove(old)
        store.collect(set().union(*self._replaced.values()))

    def _write(self, rounds: int, server: Tree, fresh: Mapping[int, Entry], notes: dict[str, Any]) -> None:
        entry = write_tree(self.folder / f"server-{rounds:06d}.safetensors", server)
        self._add_to_manifest(rounds, fresh)
        fields: dict[str, Any] = {
            "format": FORMAT,
            "rounds": rounds,
            "server": entry,
            "clients": {str(c): e for c, e in self._listed.items()},
            "notes": notes,
        }
        if self._index is not None:
            fields["index"] = self._index
        text = json.dumps({**fields, "digest": _digest(fields)}, indent=1)
        write_durably(self._manifest(rounds), text.encode())

    def _add_to_manifest(self, rounds: int, fresh: Mapping[int, Entry]) -> None:
        """Add clients to the next manifest; put all of them into an index if they are too many."""
        self._listed = {**self._listed, **fresh}
        if len(self._listed) > MAX_CLIENTS_IN_MANIFEST:
            data = json.dumps({str(c): e for c, e in self._entries.items()}).encode()
            path = self.folder / f"index-{rounds:06d}.json"
            write_durably(path, data)
            self._index, self._listed = Entry(path.name, hashlib.sha256(data).hexdigest()), {}

    def load(self, warn: Callable[[str], None], clients: bool = True) -> tuple[Generation, Tree] | None:
        """Return the newest whole generation and its server state; None if there is none.

        With `clients` the files of all clients are verified. Without it each is verified only when it is read.
        """
        generation = self.group.from_first(lambda: self._newest(warn, clients))
        return None if generation is None else (generation, read_tree(self.folder, generation.server))

    def _newest(self, warn: Callable[[str], None], clients: bool) -> Generation | None:
        damages = []
        for number in self.rounds():
            try:
                generation = self._read(number)
                read_verified(self.folder, generation.server)
                if clients:
                    verify(self.clients, generation.clients.values())
            except CheckpointError as error:
                damages.append(f"the checkpoint of round {number} is damaged ({error})")
                continue
            for damage in damages:
                warn(f"{damage}; going on from round {number}")
            return generation
        if damages:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged; start again with another --out ({damages[0]})"
            )
        return None

    def restore(self, store: ClientStore, generation: Generation) -> None:
        """Put the clients of a generation into a store; drop newer generations and half-written files."""
        self._entries = dict(generation.clients)
        self._index, self._listed = generation.index, generation.listed
        self._indices = {generation.rounds: None if generation.index is None else generation.index.file}
        self._replaced = {}
        older = [n for n in self.rounds() if n < generation.rounds][: KEPT_GENERATIONS - 1]
        present = {e.file for e in generation.clients.values()}
        for number in older:
            with contextlib.suppress(CheckpointError):
                before = self._read(number)
                self._indices[number] = None if before.index is None else before.index.file
                self._replaced[number] = {e.file for e in before.clients.values()} - present
        # All have read before anything goes.
        self.group.wait()
        if self.group.first:
            self._tidy({generation.rounds, *older})
        mine = {c: generation.clients[c] for c in self.group.mine(generation.clients)}
        store.load(mine, set().union(*self._replaced.values()), self.group.mine)
        self.group.wait()

    def _tidy(self, kept: set[int]) -> None:
        """Drop all other generations, and the files of an interrupted save."""
        for number in self.rounds():
            if number not in kept:
                self._remove(number)
        named = {f"server-{number:06d}.safetensors" for number in kept} | set(self._indices.values())
        for path in self.folder.iterdir():
            if CHECKPOINT_FILE.fullmatch(path.name) and path.name not in named:
                path.unlink()
        sync_folder(self.folder)

    def _manifest(self, rounds: int) -> Path:
        return self.folder / f"manifest-{rounds:06d}.json"

    def _remove(self, rounds: int) -> None:
        """Remove a generation; first its manifest, so that no manifest names a file that is gone."""
        self._replaced.pop(rounds, None)
        index = self._indices.pop(rounds, None)
        if not self.group.first:
            return
        for path in (self._manifest(rounds), self.folder / f"server-{rounds:06d}.safetensors"):
            with contextlib.suppress(OSError):
                path.unlink()
        if index is not None and index not in self._indices.values():
            with contextlib.suppress(OSError):
                (self.folder / index).unlink()

    def _read(self, rounds: int) -> Generation:
        path = self._manifest(rounds)
        try:
            fields = json.loads(path.read_bytes())
            if fields.pop("digest") != _digest(fields) or fields["format"] != FORMAT:
                raise ValueError("it was changed, or written by another version of fedslr")
            listed = _by_client(fields["clients"])
            index = Entry(*fields["index"]) if "index" in fields else None
            earlier = {} if index is None else _by_client(json.loads(read_verified(self.folder, index)))
            clients = {**earlier, **listed}
            return Generation(fields["rounds"], Entry(*fields["server"]), clients, fields["notes"], index, listed)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is unreadable: {error}") from error
