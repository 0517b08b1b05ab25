"""The processes that simulate one federation; here, a single one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from fedslr.core.tree import Tree

T = TypeVar("T")


class Group:
    """A single process, which has all clients and waits for no other."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.should_stop: Callable[[], bool] = lambda: False
        """Returns whether this process was asked to end the run; read once per round."""

    @property
    def first(self) -> bool:
        """Whether this process writes the files that a run has only once."""
        return self.rank == 0

    def owner(self, client: int) -> int:
        """Return the process that trains a client."""
        return client % self.size

    def mine(self, clients: Iterable[int]) -> list[int]:
        """Return the clients of this process, among some."""
        return [c for c in clients if self.owner(c) == self.rank]

    def sum(self, own: Tree | None, weight: float, device: torch.device) -> tuple[Tree | None, float]:
        """Return the sums over all processes of a tree and of a weight; None stands for a tree of zeros."""
        return own, weight

    def add_counts(self, own: Sequence[int]) -> list[int]:
        """Return the sums over all processes of some counts."""
        return [sum(counts) for counts in zip(*self.gather(list(own)), strict=True)]

    def stop(self) -> bool:
        """Return whether the run is to stop after this round; all processes return the same."""
        return self.should_stop()

    def gather(self, own: T) -> list[T]:
        """Return the values of all processes."""
        return [own]

    def each(self, clients: Iterable[int], own: Sequence[T]) -> list[T]:
        """Return one value per client, from the values of the clients of this process."""
        parts = [iter(part) for part in self.gather(own)]
        return [next(parts[self.owner(c)]) for c in clients]

    def from_first(self, make: Callable[[], T]) -> T:
        """Return in all processes a value that the first one makes."""
        return self.gather(make() if self.first else None)[0]  # type: ignore[return-value]

    def after_first(self, work: Callable[[], T]) -> T:
        """Let the first process work alone, then the others, which find its files on the disk."""
        if self.first:
            done = work()
            self.wait()
            return done
        self.wait()
        return work()

    def wait(self) -> None:
        """Wait for all processes."""
        self.gather(None)
