"""Checkpoints: atomic, verified, resumable. A finished round is never lost.

    checkpoint/
      manifest-000012.json        names every file of the generation with its SHA-256, and its own digest
      server-000012.safetensors   the server's state and the initial model
      clients/client-000003-000011.safetensors …

Files are written first, the manifest last, each flushed and renamed into place; two generations are kept. A generation
is believed only if its manifest and every file it names are unchanged; else the one before it is used. Shuffles,
cohorts and batches are drawn from (seed, round, client), so no generator's state has to be kept. A client that did not
train between two generations has one file that both name: damage to it is damage to both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedslr.engine.distributed import Group
from fedslr.errors import CheckpointError
from fedslr.store import ClientStore, Entry, read_tree, read_verified, sync_folder, write_durably, write_tree
from fedslr.tree import Tree

FORMAT = 1
KEPT = 2
"""Generations on disk."""
OURS = re.compile(r"server-\d+\.safetensors|\.(server|manifest)-\d+\.(safetensors|json)\.\d+\.tmp")
"""Names that may be left over from a save that was cut off."""


@dataclass
class Generation:
    """Everything a run needs to go on after `rounds` finished rounds."""

    rounds: int
    server: Entry
    clients: dict[int, Entry]
    notes: dict[str, Any] = field(default_factory=dict)
    """Small facts of the run: how long metrics.jsonl was, seconds spent."""


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The generations in a run's `checkpoint/` folder.

    Of several processes each writes the files of its own clients, and the first writes the rest when all have done so.
    """

    def __init__(self, folder: Path, group: Group | None = None) -> None:
        self.folder = folder
        self.group = group or Group()
        self.clients = folder / "clients"
        self._named: dict[int, set[str]] = {}
        try:
            self.clients.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {self.clients}: {error.strerror}") from error

    def rounds(self) -> list[int]:
        """The generations there are, newest first."""
        found = (re.fullmatch(r"manifest-(\d+)\.json", p.name) for p in self.folder.iterdir())
        return sorted((int(m.group(1)) for m in found if m), reverse=True)

    def save(self, rounds: int, server: Tree, store: ClientStore, notes: dict[str, Any]) -> None:
        """Write a generation; whatever happens meanwhile, an older one stays whole."""
        parts = self.group.gather(store.save(rounds))
        clients = {c: e for part in parts for c, e in part.items()}
        if self.group.first:
            self._write(rounds, server, clients, notes)
        self.group.wait()
        self._named[rounds] = {e.file for e in clients.values()}
        for old in sorted(self._named)[:-KEPT]:
            del self._named[old]
        store.collect(set().union(*self._named.values()))

    def _write(self, rounds: int, server: Tree, clients: dict[int, Entry], notes: dict[str, Any]) -> None:
        entry = write_tree(self.folder / f"server-{rounds:06d}.safetensors", server)
        fields: dict[str, Any] = {
            "format": FORMAT,
            "rounds": rounds,
            "server": entry,
            "clients": {str(c): e for c, e in clients.items()},
            "notes": notes,
        }
        text = json.dumps({**fields, "digest": _digest(fields)}, indent=1)
        write_durably(self._manifest(rounds), text.encode())
        for old in self.rounds()[KEPT:]:
            self._remove(old)

    def load(self, warn: Callable[[str], None]) -> tuple[Generation, Tree] | None:
        """The newest whole generation and its server state; None if there is none at all."""
        generation = self.group.from_first(lambda: self._newest(warn))
        return None if generation is None else (generation, read_tree(self.folder, generation.server))

    def _newest(self, warn: Callable[[str], None]) -> Generation | None:
        damages = []
        for number in self.rounds():
            try:
                generation = self._read(number)
                read_verified(self.folder, generation.server)
                for entry in generation.clients.values():
                    read_verified(self.clients, entry)
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
        """Put the clients of a generation into a store, and drop what was written after it or left half written."""
        self._named = {generation.rounds: {e.file for e in generation.clients.values()}}
        older = [n for n in self.rounds() if n < generation.rounds][: KEPT - 1]
        for number in older:
            with contextlib.suppress(CheckpointError):
                self._named[number] = {e.file for e in self._read(number).clients.values()}
        if self.group.first:
            self._tidy({generation.rounds, *older})
        mine = {c: generation.clients[c] for c in self.group.mine(generation.clients)}
        store.load(mine, set().union(*self._named.values()))
        # Whoever goes on writes files, which the others must not take for left over.
        self.group.wait()

    def _tidy(self, kept: set[int]) -> None:
        """Drop all other generations, and what a save that was cut off left."""
        for number in self.rounds():
            if number not in kept:
                self._remove(number)
        named = {f"server-{number:06d}.safetensors" for number in kept}
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name) and path.name not in named:
                path.unlink()
        sync_folder(self.folder)

    def _manifest(self, rounds: int) -> Path:
        return self.folder / f"manifest-{rounds:06d}.json"

    def _remove(self, rounds: int) -> None:
        """The manifest goes first, so that no manifest ever names a server file that is gone."""
        for path in (self._manifest(rounds), self.folder / f"server-{rounds:06d}.safetensors"):
            with contextlib.suppress(OSError):
                path.unlink()
        self._named.pop(rounds, None)

    def _read(self, rounds: int) -> Generation:
        path = self._manifest(rounds)
        try:
            fields = json.loads(path.read_bytes())
            digest = fields.pop("digest")
            if digest != _digest(fields) or fields["format"] != FORMAT:
                raise ValueError("its digest does not match")
            clients = {int(c): Entry(*e) for c, e in fields["clients"].items()}
            return Generation(fields["rounds"], Entry(*fields["server"]), clients, fields["notes"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is unreadable: {error}") from error
