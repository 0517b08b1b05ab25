"""The basic types: Params, Payload, Batch, Round, LocalData."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

Params = dict[str, Tensor]
"""A model, a gradient or a dual: one tensor for every trainable parameter of the model, by the parameter's name."""


Payload = dict[str, Any]
"""The content of a message: tensors, low-rank factors or nested dictionaries, by name."""


Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of the outputs and the targets of a batch that returns the loss of every sample, or the mean loss."""


class Batch(NamedTuple):
    """A batch of a client's training data."""

    x: Tensor
    """The inputs."""
    y: Tensor
    """The targets."""


class Steps(NamedTuple):
    """A number of batches, in place of a number of passes over the data."""

    number: int


Amount = int | Steps
"""An amount of training: a number of passes over the data, or a number of batches."""


def count_batches(amount: Amount, per_pass: Any) -> Any:
    """Return the number of batches in an amount of training, given those of one pass."""
    return amount.number if isinstance(amount, Steps) else amount * per_pass


class Round(NamedTuple):
    """The number, the step sizes and the amounts of training of a round."""

    number: int
    """The round's number, counted from 0."""
    total: int
    """The number of rounds of the run."""
    lr: float
    """The local step size η of this round."""
    decay: float
    """The factor on every decaying step size: η divided by the setting `lr`, which is the first η without warm-up."""
    epochs: Amount
    """Passes over the data for the global part, or a number of batches. Hand it on to `data`."""
    personal_epochs: Amount
    """The same for a personal part."""
    personal_ratio: float = 1.0
    """The step size of the personal phase divided by η."""

    def in_personal_phase(self) -> Round:
        """Return this round with the step size of the personal phase."""
        return self._replace(lr=self.lr * self.personal_ratio)


class LocalData(Protocol):
    """One client's training data, as `local_update`, `personalize` and `personal_model` receive it."""

    num_examples: int
    """The number of training samples; may be a tensor."""
    client: Any
    """The client's number; may be a tensor."""

    def epochs(self, count: Amount, phase: int = 0) -> Iterable[Batch]:
        """Return the batches of several passes over the data.

        Args:
            count: The number of passes, or of batches. Every pass is shuffled anew; the last one may be cut off.
            phase: The number of a method's training phase. Every phase has its own shuffles.
        """
        ...

    def pairs(self, count: Amount, phase: int = 0) -> Iterable[tuple[Batch, Batch]]:
        """Return the batches of `epochs`, each with the next batch of its pass; the last batch has the first one."""
        ...

    def first_batch(self, phase: int = 0) -> Batch:
        """Return the first batch of `epochs`."""
        ...

    def steps(self, count: Amount) -> int:
        """Return the number of batches that `epochs` returns."""
        ...
