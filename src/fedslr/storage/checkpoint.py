"""Write and read checkpoints, which are atomic and verified. A saved round is never lost.

    checkpoint/
      manifest-000012.json        every file of the generation with its SHA-256, and the manifest's own digest
      server-000012.safetensors   the server's state and the initial model
      index-000010.json           only with many clients: the files of all clients at an earlier round
      clients/client-000003-000011.safetensors …

A manifest names the files of the clients that changed since its index, so the cost of a checkpoint depends only on how
many clients trained since the last one. The manifest is written after all other files. Every file is flushed and
renamed into place. Two generations are kept. A generation is used only if its manifest and every file that it names are
unchanged; otherwise the generation before it is used. If a client did not train between two generations, both name the
same file, and damage to that file damages both. Shuffles, cohorts and batches are drawn from (seed, round, client), so
no state of a random generator has to be saved.
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
from fedslr.storage.run_folder import FEDERATION_DATABASE
from fedslr.storage.tree_files import Entry, read_tree, read_verified, verify, write_tree

FORMAT = 1
KEPT_GENERATIONS = 2
"""The number of checkpoints that are kept on disk."""
MAX_CLIENTS_IN_MANIFEST = 1000
"""The most clients in a manifest. The files of more clients are written to an index."""
CHECKPOINT_FILE = re.compile(
    r"server-\d+\.safetensors|index-\d+\.json|\.(server|manifest|index)-\d+\.(safetensors|json)\.\d+\.tmp"
)
"""The names of files that an interrupted save may leave behind."""


@dataclass
class Generation:
    """The files of a checkpoint, from which a run goes on after `rounds` finished rounds."""

    rounds: int
    server: Entry
    clients: dict[int, Entry]
    """The files of all clients: those of the index and the changed ones."""
    notes: dict[str, Any]
    """Facts about the run, such as the length of metrics.jsonl and the seconds spent."""
    index: Entry | None
    changed: dict[int, Entry]
    """The files of the clients that trained since the index was written."""


@dataclass
class Kept:
    """A generation on disk: the name of its index, and its clients' files that no later generation names."""

    index: str | None
    replaced: set[str] = field(default_factory=set)


def _by_client(entries: dict[str, Any]) -> dict[int, Entry]:
    return {int(client): Entry(*entry) for client, entry in entries.items()}


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


NO_CHECKPOINT = "{}: this folder has no checkpoint, so it has no models; name the folder of a single run"
DEPLOYED = "{}: this is a deployed federation; get its models with fedslr export RUN --global, or STORE on a node"


def require_checkpoint(run: Path) -> Path:
    """Return the folder of a run's checkpoints; raise a CheckpointError if there are none."""
    if not (run / "checkpoint").is_dir():
        raise CheckpointError((DEPLOYED if (run / FEDERATION_DATABASE).exists() else NO_CHECKPOINT).format(run))
    return run / "checkpoint"


class Checkpoints:
    """The generations in a run's `checkpoint/` folder.

    If several processes run together, each writes the files of its own clients. Then the first process writes the rest.
    """

    def __init__(self, folder: Path, group: Group | None = None) -> None:
        self.folder = folder
        self.group = group or Group()
        self.clients = folder / "clients"
        self._entries: dict[int, Entry] = {}
        """The newest file of every client."""
        self._index: Entry | None = None
        self._changed: dict[int, Entry] = {}
        self._kept: dict[int, Kept] = {}
        """The generations on disk, by their rounds."""
        with disk_errors(self.clients):
            self.clients.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        """Return the rounds of all generations, newest first."""
        found = (re.fullmatch(r"manifest-(\d+)\.json", p.name) for p in self.folder.iterdir())
        return sorted((int(m.group(1)) for m in found if m), reverse=True)

    def save(self, rounds: int, server: Tree, store: ClientStore, notes: dict[str, Any]) -> None:
        """Write a generation. The older ones stay whole even if the process is killed meanwhile."""
        trained = {c: e for part in self.group.gather(store.save()) for c, e in part.items()}
        self._entries |= trained
        if self.group.first:
            self._write(rounds, server, trained, notes)
        self.group.wait()
        if self._kept:
            self._kept[max(self._kept)].replaced = store.replaced - self._replaced()
        self._kept[rounds] = Kept(self._index and self._index.file)
        for old in sorted(self._kept)[:-KEPT_GENERATIONS]:
            self._remove(old)
        store.collect(self._replaced())

    def _replaced(self) -> set[str]:
        """Return the clients' files that only generations before the newest name."""
        return set().union(*(kept.replaced for kept in self._kept.values()))

    def _write(self, rounds: int, server: Tree, trained: Mapping[int, Entry], notes: dict[str, Any]) -> None:
        entry = write_tree(self.folder / f"server-{rounds:06d}.safetensors", server)
        self._add_to_manifest(rounds, trained)
        fields: dict[str, Any] = {
            "format": FORMAT,
            "rounds": rounds,
            "server": entry,
            "clients": {str(c): e for c, e in self._changed.items()},
            "notes": notes,
        }
        if self._index is not None:
            fields["index"] = self._index
        text = json.dumps({**fields, "digest": _digest(fields)}, indent=1)
        write_durably(self._manifest(rounds), text.encode())

    def _add_to_manifest(self, rounds: int, trained: Mapping[int, Entry]) -> None:
        """Add clients to the next manifest; write all clients to an index if there are too many."""
        self._changed = {**self._changed, **trained}
        if len(self._changed) > MAX_CLIENTS_IN_MANIFEST:
            data = json.dumps({str(c): e for c, e in self._entries.items()}).encode()
            path = self.folder / f"index-{rounds:06d}.json"
            write_durably(path, data)
            self._index, self._changed = Entry(path.name, hashlib.sha256(data).hexdigest()), {}

    def load(self, warn: Callable[[str], None], clients: bool = True) -> tuple[Generation, Tree] | None:
        """Return the newest undamaged generation and its server state; None if there is no generation.

        Args:
            warn: Called with a sentence about every damaged generation that is newer.
            clients: Verify the files of all clients now. Otherwise each file is verified when it is read.
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
                f"every checkpoint in {self.folder} is damaged; restore it from a backup, or repeat the run in another "
                f"folder: {damages[0]}"
            )
        return None

    def restore(self, store: ClientStore, generation: Generation) -> None:
        """Load the clients of a generation into a store; remove newer generations and unfinished files."""
        self._entries = dict(generation.clients)
        self._index, self._changed = generation.index, generation.changed
        self._kept = {generation.rounds: Kept(self._index and self._index.file)}
        older = [n for n in self.rounds() if n < generation.rounds][: KEPT_GENERATIONS - 1]
        present = {e.file for e in generation.clients.values()}
        for number in older:
            with contextlib.suppress(CheckpointError):
                before = self._read(number)
                replaced = {e.file for e in before.clients.values()} - present
                self._kept[number] = Kept(before.index and before.index.file, replaced)
        # Remove nothing before all processes have read.
        self.group.wait()
        if self.group.first:
            self._tidy({generation.rounds, *older})
        mine = {c: generation.clients[c] for c in self.group.mine(generation.clients)}
        store.load(mine, self._replaced(), self.group.mine)
        self.group.wait()

    def _tidy(self, kept: set[int]) -> None:
        """Remove all other generations, and the files of an interrupted save."""
        for number in self.rounds():
            if number not in kept:
                self._remove(number)
        named = {f"server-{n:06d}.safetensors" for n in kept} | {k.index for k in self._kept.values()}
        for path in self.folder.iterdir():
            if CHECKPOINT_FILE.fullmatch(path.name) and path.name not in named:
                path.unlink()
        sync_folder(self.folder)

    def _manifest(self, rounds: int) -> Path:
        return self.folder / f"manifest-{rounds:06d}.json"

    def _remove(self, rounds: int) -> None:
        """Remove a generation. Remove its manifest first, so that no manifest names a missing file."""
        index = self._kept.pop(rounds, Kept(None)).index
        files = [self._manifest(rounds).name, f"server-{rounds:06d}.safetensors"]
        if index is not None and all(kept.index != index for kept in self._kept.values()):
            files.append(index)
        for name in files if self.group.first else ():
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def _read(self, rounds: int) -> Generation:
        path = self._manifest(rounds)
        try:
            fields = json.loads(path.read_bytes())
            if fields.pop("digest") != _digest(fields) or fields["format"] != FORMAT:
                raise ValueError
            changed = _by_client(fields["clients"])
            index = Entry(*fields["index"]) if "index" in fields else None
            earlier = {} if index is None else _by_client(json.loads(read_verified(self.folder, index)))
            clients = {**earlier, **changed}
            return Generation(fields["rounds"], Entry(*fields["server"]), clients, fields["notes"], index, changed)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} was changed, or written by another version of fedslr") from error
