"""Keep the states of clients in memory up to a budget, and the rest on disk.

A state is a plain tree (see `fedslr.core.states.plain`). On disk, every version of a state is one safetensors file that
never changes, so the files of an older checkpoint stay valid while newer files are written. Threads write files, and
read those that are needed soon, while clients train. Only `save` guarantees that files are durable.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import weakref
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
from fedslr.core.tree import Tree, leaves
from fedslr.storage.tree_files import Entry, read_tree, threads, write_tree

CLIENT_FILE = re.compile(r"\.?client-(\d+)-\d+\.safetensors(\.\d+\.tmp)?")
"""The names of a store's files; temporary names are those of unfinished writes. A store touches no other file."""
MAX_PENDING_WRITES = 16
"""The most states that may wait to be written. Beyond it, training waits for the disk."""
GPU_MEMORY_SHARE = 0.5
"""The share of the GPU memory that is free when the run starts that client states may take."""


def size(tree: Tree) -> int:
    """Return the bytes that a state's tensors take in memory."""
    return sum(x.numel() * x.element_size() for leaf in leaves(tree) for x in factored.tensors_of(leaf))


def pinned(tree: Tree) -> Tree:
    """Copy a state to pinned host memory, which a GPU reads directly."""
    return factored.each_tensor(Tensor.pin_memory, factored.to_host(tree))


class Tier:
    """States in one kind of memory, oldest first. `place` copies a state into that memory."""

    def __init__(self, capacity: float, place: Callable[[Tree], Tree]) -> None:
        self.capacity, self.place = capacity, place
        self.bytes = 0
        """The bytes that the states take now; `capacity` is the limit."""
        self.states: dict[int, Tree] = {}

    def add(self, client: int, state: Tree) -> None:
        self.states[client] = self.place(state)
        self.bytes += size(self.states[client])

    def drop(self, client: int) -> Tree | None:
        state = self.states.pop(client, None)
        self.bytes -= 0 if state is None else size(state)
        return state

    def overflow(self) -> Iterator[tuple[int, Tree]]:
        """Remove and yield the oldest states until the rest fits."""
        while self.bytes > self.capacity:
            client = next(iter(self.states))
            state = self.drop(client)
            assert state is not None
            yield client, state


def tiers(device: torch.device, budget: int | None) -> list[Tier]:
    """Return the kinds of memory for states, fastest first: GPU memory, then host memory."""
    capacity = inf if budget is None else budget
    if device.type != "cuda":
        return [Tier(capacity, lambda state: factored.to_device(state, device))]
    on_device = min(capacity, GPU_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    return [Tier(on_device, lambda state: factored.to_device(state, device)), Tier(capacity - on_device, pinned)]


class ClientStore:
    """The states of all clients that have trained. Other clients are still in their initial state.

    The store keeps the states of the clients that trained last in memory, as many as the budget (in bytes) allows; None
    is no limit. It writes the other states to files. `save` makes every state durable, so that a checkpoint can name
    the files in `entries`. The store removes a file when no kept checkpoint names it any more.

    Threads read and write the files. Everything else happens in the caller's thread, which registers finished writes in
    the order of their requests. A failed write raises its error at the latest in `save`, and a failed read in `get`. A
    state leaves memory only after its file is written. Nobody changes the tensors of a state that was put.
    """

    def __init__(
        self, folder: Path | None = None, device: torch.device | str = "cpu", budget: int | None = None
    ) -> None:
        self.folder = folder
        self.device = torch.device(device)
        self.entries: dict[int, Entry] = {}
        """The newest file of every client."""
        self.replaced: set[str] = set()
        """Files with older states that a checkpoint still names."""
        self._unnamed: dict[int, Entry] = {}
        """The entries that no checkpoint names yet."""
        self._tiers = tiers(self.device, budget)
        self._unsaved: dict[int, int] = {}
        self._being_written: dict[int, Tree] = {}
        self._writing: deque[tuple[int, int, Future[Entry]]] = deque()
        self._reading: dict[int, Future[Tree]] = {}
        self._workers: ThreadPoolExecutor | None = None

    # --- states ------------------------------------------------------------------------------------------------------

    def get(self, client: int) -> Tree | None:
        """Return a client's state; None if the client never trained."""
        held = self._held(client)
        if held is not None:
            return factored.to_device(held, self.device)
        ahead, entry = self._reading.pop(client, None), self.entries.get(client)
        if entry is None:
            return None
        state = ahead.result() if ahead else read_tree(self._folder(), entry)
        tier = next((t for t in self._tiers if t.bytes + size(state) <= t.capacity), None)
        if tier is not None:
            tier.add(client, state)
        return factored.to_device(state, self.device)

    def put(self, client: int, state: Tree, version: int) -> None:
        """Replace a client's state. The version, a round, must increase."""
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
        """Begin to read the states that `get` will be called for next."""
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

    def save(self) -> dict[int, Entry]:
        """Make every state durable; return the files that no checkpoint names yet, by client."""
        self.flush()
        for client in sorted(self._unsaved):
            self._write(client)
            self._finish_writes(MAX_PENDING_WRITES)
        self.flush()
        if self._unnamed:
            with disk_errors(self._folder()):
                sync_folder(self._folder())
        return dict(self._unnamed)

    def flush(self) -> None:
        """Wait until every state that left memory is written."""
        self._finish_writes(0)

    def collect(self, named: Collection[str]) -> None:
        """Remove the replaced files that no kept checkpoint names any more. Call it after each checkpoint."""
        self._unnamed = {}
        gone = {file for file in self.replaced if file not in named}
        self.replaced -= gone
        self._remove(gone)

    def load(
        self,
        entries: Mapping[int, Entry],
        named: Collection[str],
        mine: Callable[[list[int]], list[int]] = lambda clients: clients,
    ) -> None:
        """Go back to the states that a checkpoint names.

        Args:
            entries: The files of the checkpoint, by client.
            named: Files that other kept checkpoints name.
            mine: Picks the clients whose files this store looks after, if several stores share a folder.
        """
        self.close()
        for client in {*self._unsaved, *self._being_written, *(c for t in self._tiers for c in t.states)}:
            self._forget(client)
        self._unsaved = {}
        self.entries = dict(entries)
        present = {entry.file for entry in entries.values()}
        ours = (CLIENT_FILE.fullmatch(path.name) for path in self._folder().iterdir())
        found = {match.group(): int(match.group(1)) for match in ours if match}
        here = set(mine(list(found.values())))
        self.replaced = {name for name, client in found.items() if client in here} - present
        self.collect(named)

    def close(self) -> None:
        """Finish the writes that have begun and cancel the others, whose states stay in memory."""
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
        """Let a thread write a client's state to disk."""
        # Only `save` writes states that are still on a GPU. It waits, so no CUDA graph is captured during the copy.
        version, state = self._unsaved[client], self._held(client)
        assert state is not None
        path = self._folder() / f"client-{client:06d}-{version:06d}.safetensors"
        job = self._run(write_tree, path, state, write_whole)
        self._writing.append((client, version, job))

    def _finish_writes(self, pending: int) -> None:
        """Register finished writes in order; wait until at most `pending` writes are left."""
        while self._writing and (len(self._writing) > pending or self._writing[0][2].done()):
            client, version, job = self._writing.popleft()
            self._register(client, job.result())
            if self._unsaved.get(client) == version:
                del self._unsaved[client]
                self._being_written.pop(client, None)

    def _register(self, client: int, new: Entry) -> None:
        """Register a client's new file; remove the old file at once if no checkpoint names it."""
        old = self.entries.get(client)
        if old is not None and old.file != new.file:
            if client in self._unnamed:
                self._remove({old.file})
            else:
                self.replaced.add(old.file)
        self.entries[client] = self._unnamed[client] = new

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._folder().joinpath(name).unlink()

    def _folder(self) -> Path:
        assert self.folder is not None, "a store without a folder keeps every state in memory"
        return self.folder


def temporary_store(owner: object, device: torch.device, budget: int | None) -> ClientStore:
    """Return a store for a run without a folder; its files are removed when `owner` is garbage-collected."""
    if budget is None:
        return ClientStore(None, device, None)
    folder = Path(tempfile.mkdtemp(prefix="fedslr-"))
    store = ClientStore(folder, device, budget)
    weakref.finalize(owner, _discard, store, folder)
    return store


def _discard(store: ClientStore, folder: Path) -> None:
    store.close()
    shutil.rmtree(folder, ignore_errors=True)
