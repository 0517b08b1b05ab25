"""The basic types: Params, Payload, Batch, Round, LocalData."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

Params = dict[str, Tensor]
"""A model, a gradient, a dual: one tensor for every trainable parameter of the model."""


Payload = dict[str, Any]
"""The content of a message: names to tensors, low-rank factors or nested dictionaries."""


Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of a batch to their mean loss."""


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


class Round(NamedTuple):
    """The number and the step sizes of a round, for a client that trains in it."""

    number: int
    """Counted from 0."""
    total: int
    lr: float
    """The local step size η of this round."""
    decay: float
    """The factor on every decaying step size: η over its first value."""
    epochs: int
    """Passes over the data for the global part."""
    personal_epochs: int
    """Passes over the data for a personal part."""


class LocalData(Protocol):
    """One client's training data, as an engine hands it to `local_update`."""

    num_examples: int
    client: Any
    """The client's number."""

    def epochs(self, count: int, phase: int = 0) -> Iterable[Batch]:
        """The batches of `count` freshly shuffled passes; each phase of a method has shuffles of its own."""
        ...

    def pairs(self, count: int, phase: int = 0) -> Iterable[tuple[Batch, Batch]]:
        """The same batches, each with the next one of its epoch; the last with the first."""
        ...

    def first_batch(self, phase: int = 0) -> Batch:
        """The first batch of `epochs`."""
        ...

    def steps(self, count: int) -> int:
        """Return the number of batches in `count` passes."""
        ...
