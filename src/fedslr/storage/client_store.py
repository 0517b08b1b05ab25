"""Where client state lives: in memory up to a budget, else on disk. The same store serves simulation and deployment.

A state is a plain tree (see `plain`). Whatever is kept on disk is one safetensors file per client and version, never
changed once written, so the files of an older checkpoint stay as they are while newer ones are made. Files are written,
and those soon needed are read, by threads beside the training; only `save` promises that they are durable.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedslr.core import factored
from fedslr.core.durable import disk_errors, sync_folder, write_whole
from fedslr.core.errors import CheckpointError
from fedslr.core.tree import Tree, leaves
from fedslr.storage.tree_files import Entry, read_tree, threads, write_tree

CLIENT_FILE = re.compile(r"\.?client-(\d+)-\d+\.safetensors(\.\d+\.tmp)?")
"""The names of a store's files, of which some may be half written. A store touches no other file."""
MAX_PENDING_WRITES = 16
"""The most states that wait to be written; if there are more, the training waits for the disk."""
GPU_MEMORY_SHARE = 0.5
"""The share of a GPU's memory, free when the run starts, that client states may take."""


def size(tree: Tree) -> int:
    """Return the bytes that a state's tensors take in memory."""
    return sum(x.numel() * x.element_size() for leaf in leaves(tree) for x in factored.tensors_of(leaf))


def pinned(tree: Tree) -> Tree:
    """Copy a state to pinned memory of the host, which a GPU reads directly."""
    return factored.each_tensor(Tensor.pin_memory, factored.to_host(tree))


class Tier:
    """States in one kind of memory, oldest first.

    Attributes:
        capacity: The most bytes that the states may take.
        place: Copies a state into this kind of memory.
        bytes: The bytes that the states take now.
        states: The states by client.
    """

    def __init__(self, capacity: float, place: Callable[[Tree], Tree]) -> None:
        self.capacity, self.place = capacity, place
        self.bytes = 0
        self.states: dict[int, Tree] = {}

    def add(self, client: int, state: Tree) -> None:
        placed = self.place(state)
        self.states[client] = placed
        self.bytes += size(placed)

    def drop(self, client: int) -> Tree | None:
        state = self.states.pop(client, None)
        self.bytes -= 0 if state is None else size(state)
        return state

    def overflow(self) -> Iterator[tuple[int, Tree]]:
        """Remove states until the rest fits, oldest first; yield them."""
        while self.bytes > self.capacity:
            client = next(iter(self.states))
            state = self.drop(client)
            assert state is not None
            yield client, state


def tiers(device: torch.device, budget: int | None) -> list[Tier]:
    """Return the kinds of memory for states, fastest first: a GPU's, then the host's."""
    capacity = inf if budget is None else budget
    if device.type != "cuda":
        return [Tier(capacity, lambda state: factored.to_device(state, device))]
    on_device = min(capacity, GPU_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    return [Tier(on_device, lambda state: factored.to_device(state, device)), Tier(capacity - on_device, pinned)]


class ClientStore:
    """The state of every client that has trained; the others are still as they began.

    The states of the clients that trained last are in memory, as many as the budget (in bytes) allows, all without one;
    what does not fit goes to files. `save` makes every state durable and gives the files of all clients, for a
    checkpoint to name. A file is removed as soon as no checkpoint that is kept names it.

    Some threads read and write files; everything else happens in the caller's thread. There, finished writes count in
    the order in which they were asked for, and failures surface: of a write, at the latest in `save`; of a read, in
    `get`. A state leaves memory only once its file is written, and its tensors are never changed once it was put.
    """

    def __init__(
        self, folder: Path | None = None, device: torch.device | str = "cpu", budget: int | None = None
    ) -> None:
        self.folder = folder
        self.device = torch.device(device)
        self.entries: dict[int, Entry] = {}
        self.fresh: dict[int, Entry] = {}
        """Of the entries, those that no checkpoint names yet."""
        self.replaced: set[str] = set()
        """Files that hold no client's present state, but that a checkpoint names."""
        self._tiers = tiers(self.device, budget)
        self._unsaved: dict[int, int] = {}
        self._being_written: dict[int, Tree] = {}
        self._writing: deque[tuple[int, int, Future[Entry]]] = deque()
        self._reading: dict[int, Future[Tree]] = {}
        self._workers: ThreadPoolExecutor | None = None

    # --- states ------------------------------------------------------------------------------------------------------

    def get(self, client: int) -> Tree | None:
        """Return a client's state; None if it never trained."""
        held = self._held(client)
        if held is not None:
            return factored.to_device(held, self.device)
        ahead, entry = self._reading.pop(client, None), self.entries.get(client)
        if entry is None:
            return None
        state = ahead.result() if ahead else read_tree(self._folder(), entry)
        need = size(state)
        tier = next((t for t in self._tiers if t.bytes + need <= t.capacity), None)
        if tier is not None:
            tier.add(client, state)
        return factored.to_device(state, self.device)

    def put(self, client: int, state: Tree, version: int) -> None:
        """Replace a client's state; the version (a round) must grow."""
        self._forget(client)
        self._unsaved[client] = version
        self._tiers[0].add(client, state)
        for upper, lower in zip(self._tiers, [*self._tiers[1:], None], strict=True):
            for evicted, old in upper.overflow():
                if lower is not None:
                    lower.add(evicted, old)
                elif evicted in self._unsaved:
                    self._being_written[evicted] = factored.to_host(old)
                    self._write(evicted)
        self._finish_writes(MAX_PENDING_WRITES)

    def prefetch(self, clients: Iterable[int]) -> None:
        """Begin to read the states that `get` will be asked for next."""
        for client in clients:
            entry = self.entries.get(client)
            if entry is not None and client not in self._reading and self._held(client) is None:
                self._reading[client] = self._run(read_tree, self._folder(), entry)

    def _held(self, client: int) -> Tree | None:
        found = (held.get(client) for held in (*(t.states for t in self._tiers), self._being_written))
        return next((state for state in found if state is not None), None)

    def _forget(self, client: int) -> None:
        self._reading.pop(client, None)
        self._being_written.pop(client, None)
        for tier in self._tiers:
            tier.drop(client)

    # --- files -------------------------------------------------------------------------------------------------------

    def save(self) -> Mapping[int, Entry]:
        """Make every state durable; return the files of all clients."""
        self.flush()
        for client in sorted(self._unsaved):
            self._write(client)
            self._finish_writes(MAX_PENDING_WRITES)
        self.flush()
        if self.fresh:
            with disk_errors(self._folder()):
                sync_folder(self._folder())
        return self.entries

    def flush(self) -> None:
        """Wait until every state that left memory is in its file."""
        self._finish_writes(0)

    def collect(self, named: Collection[str]) -> None:
        """Remove the replaced files that no kept checkpoint names any more; called after each checkpoint."""
        self.fresh = {}
        gone = {file for file in self.replaced if file not in named}
        self.replaced -= gone
        self._remove(gone)

    def load(
        self,
        entries: Mapping[int, Entry],
        named: Collection[str],
        mine: Callable[[list[int]], list[int]] = lambda clients: clients,
    ) -> None:
        """Go back to the states a checkpoint names; `named` are files that other kept checkpoints name.

        Of several stores that share a folder, each looks after the files of the clients that are its own.
        """
        self.close()
        for client in {*self._unsaved, *self._being_written, *(c for t in self._tiers for c in t.states)}:
            self._forget(client)
        self._unsaved = {}
        self.entries, self.fresh = dict(entries), {}
        present = {entry.file for entry in entries.values()}
        ours = (CLIENT_FILE.fullmatch(path.name) for path in self._folder().iterdir())
        found = {match.group(): int(match.group(1)) for match in ours if match}
        here = set(mine(list(found.values())))
        self.replaced = {name for name, client in found.items() if client in here} - present
        self.collect(named)

    def close(self) -> None:
        """Finish the writes that have begun and cancel the others; their states stay in memory."""
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        self._workers = None
        self._writing.clear()
        self._reading.clear()

    def _run(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(threads(), thread_name_prefix="fedslr-store")
        return self._workers.submit(job, *args)

    def _write(self, client: int) -> None:
        """Let a thread write a client's state to the disk."""
        # A state still on a GPU comes from `save` alone, which waits: nothing is captured while the thread copies it.
        version, state = self._unsaved[client], self._held(client)
        assert state is not None
        path = self._folder() / f"client-{client:06d}-{version:06d}.safetensors"
        job = self._run(write_tree, path, state, write_whole)
        self._writing.append((client, version, job))

    def _finish_writes(self, pending: int) -> None:
        """Register finished writes in order; wait until at most `pending` are left."""
        while self._writing and (len(self._writing) > pending or self._writing[0][2].done()):
            client, version, job = self._writing.popleft()
            self._register(client, job.result())
            if self._unsaved.get(client) == version:
                del self._unsaved[client]
                self._being_written.pop(client, None)

    def _register(self, client: int, new: Entry) -> None:
        """Register a client's new file; remove the old one at once if no checkpoint names it."""
        old = self.entries.get(client)
        if old is not None and old.file != new.file:
            if client in self.fresh:
                self._remove({old.file})
            else:
                self.replaced.add(old.file)
        self.entries[client] = self.fresh[client] = new

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._folder().joinpath(name).unlink()

    def _folder(self) -> Path:
        if self.folder is None:
            raise CheckpointError("this store has no folder to save to")
        return self.folder
