"""The processes that simulate one federation; here, a single one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from fedslr.core.tree import Tree

T = TypeVar("T")


class Group:
    """The processes of a run. This one is alone: all clients are its own, and it waits for nobody."""

    rank = 0
    size = 1

    def __init__(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._should_stop = should_stop

    @property
    def first(self) -> bool:
        """Whether this process writes what a run leaves once."""
        return self.rank == 0

    def owner(self, client: int) -> int:
        """The process a client lives in."""
        return client % self.size

    def mine(self, clients: Iterable[int]) -> list[int]:
        return [c for c in clients if self.owner(c) == self.rank]

    def mean(
        self, own: Tree | None, weight: float, counts: Sequence[int], device: torch.device
    ) -> tuple[Tree, list[int]]:
        """From the mean over this process's clients, and its weight, to that over all; counts are added up."""
        if own is None:
            raise ValueError("the mean of nothing is not defined")
        return own, list(counts)

    def stop(self) -> bool:
        """Whether the run is to stop after this round; all processes say the same."""
        return self._should_stop()

    def gather(self, own: T) -> list[T]:
        """What every process has."""
        return [own]

    def each(self, clients: Iterable[int], own: Sequence[T]) -> list[T]:
        """From one value for each of this process's clients, among some, to one for each of those."""
        parts = [iter(part) for part in self.gather(own)]
        return [next(parts[self.owner(c)]) for c in clients]

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, in all of them."""
        return self.gather(make() if self.first else None)[0]  # type: ignore[return-value]

    def after_first(self, work: Callable[[], T]) -> T:
        """Work that the first process does alone, and then the others, who find what it left on the disk."""
        if self.first:
            done = work()
            self.wait()
            return done
        self.wait()
        return work()

    def wait(self) -> None:
        """Until all processes are here."""
        self.gather(None)
