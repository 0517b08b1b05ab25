"""The clients of a run between rounds, and where their states are kept."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from fedslr.core.algorithm import Algorithm
from fedslr.core.states import plain, restore
from fedslr.core.types import Params
from fedslr.engine import contract
from fedslr.engine.workload import Member
from fedslr.storage.client_store import ClientStore

T = TypeVar("T")


class Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for; the last one is remembered."""

    def __init__(self, size: int, make: Callable[[int], T]) -> None:
        self._size, self._make = size, make
        self._last: tuple[int, T] | None = None

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        if index >= self._size:
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = (index, self._make(index))
        return self._last[1]


class Roster:
    """Every client's state, ledger and address; a client that never trained is as it began."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], start: Params, store: ClientStore) -> None:
        self.store, self.start = store, start
        client = contract.require_state("init_client", algorithm.init_client(start))
        self.fresh = Member(client, algorithm.init_ledger(start), algorithm.address(client))

    def member(self, number: int) -> Member:
        """Return a client as it is between rounds."""
        kept = self.store.get(number)
        if kept is None:
            return self.fresh
        client, ledger = (restore(getattr(self.fresh, name), kept[name]) for name in ("client", "ledger"))
        return Member(client, ledger, kept["address"])

    def members(self, numbers: Sequence[int]) -> Sequence[Member]:
        """Return some clients, each read when it is needed."""
        return Lazy(len(numbers), lambda i: self.member(numbers[i]))

    def put(self, number: int, member: Member, version: int, local: Params | None = None) -> None:
        """Keep a client after a round; `version` is the number of rounds done, `local` the model it uploaded."""
        kept = {"client": plain(member.client), "ledger": plain(member.ledger), "address": member.address}
        self.store.put(number, kept if local is None else {**kept, "local": local}, version)

    def local_model(self, number: int) -> Params:
        """Return the model that a client last uploaded; the initial one if it never trained."""
        kept = self.store.get(number)
        return self.start if kept is None else kept["local"]


def temporary_store(owner: object, device: torch.device, budget: int | None) -> ClientStore:
    """Return a store for a run without a folder; what it writes to the disk goes when its owner does."""
    if budget is None:
        return ClientStore(None, device, None)
    folder = Path(tempfile.mkdtemp(prefix="fedslr-"))
    store = ClientStore(folder, device, budget)
    weakref.finalize(owner, _discard, store, folder)
    return store


def _discard(store: ClientStore, folder: Path) -> None:
    store.close()
    shutil.rmtree(folder, ignore_errors=True)
