"""The processes that simulate one federation together; this module defines a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from fedslr.core.tree import Tree

T = TypeVar("T")


class Group:
    """A group of a single process, which trains all clients. Groups of several processes override its methods."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.should_stop: Callable[[], bool] = lambda: False
        """Returns whether this process was asked to end the run; read once per round."""

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes the run's files."""
        return self.rank == 0

    def owner(self, client: int) -> int:
        """Return the rank of the process that trains a client."""
        return client % self.size

    def mine(self, clients: Iterable[int]) -> list[int]:
        """Return those of the given clients that this process trains."""
        return [c for c in clients if self.owner(c) == self.rank]

    def sum(self, own: Tree | None, weight: float, device: torch.device) -> tuple[Tree | None, float]:
        """Return the sums of a tree and of a weight over all processes; None stands for a tree of zeros."""
        return own, weight

    def add_counts(self, own: Sequence[int]) -> list[int]:
        """Return the sums of several counts over all processes."""
        return [sum(counts) for counts in zip(*self.gather(list(own)), strict=True)]

    def stop(self) -> bool:
        """Return whether the run must stop after this round; all processes return the same answer."""
        return self.should_stop()

    def gather(self, own: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        return [own]

    def each(self, clients: Iterable[int], own: Sequence[T]) -> list[T]:
        """Return one value per client, given the values of this process's clients."""
        parts = [iter(part) for part in self.gather(own)]
        return [next(parts[self.owner(c)]) for c in clients]

    def from_first(self, make: Callable[[], T]) -> T:
        """Return in all processes the value that the first process makes."""
        return self.gather(make() if self.first else None)[0]  # type: ignore[return-value]

    def after_first(self, work: Callable[[], T]) -> T:
        """Let the first process work alone, then the others, which find the first one's files on the disk."""
        if self.first:
            done = work()
            self.wait()
            return done
        self.wait()
        return work()

    def wait(self) -> None:
        """Wait for all processes."""
        self.gather(None)
