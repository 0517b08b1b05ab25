"""The description of a run that every engine is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedslr.core.algorithm import Algorithm
from fedslr.core.problem import Problem
from fedslr.core.server_optimizers import ServerOptimizer
from fedslr.core.types import Payload
from fedslr.data.client_data import ClientData
from fedslr.data.normalization import Normalization, inputs
from fedslr.tasks.scoring import Scorer, Scores

MIN_TRAINING_SAMPLES = 20
"""Training samples of a client, if it has them, that measure the training loss even if it has few test samples."""


class Member(NamedTuple):
    """One client between rounds."""

    client: Any
    """The state that the method keeps for the client."""
    ledger: Any
    address: Payload
    """The server's copy of the address that `addressed` reads."""


class Participant(NamedTuple):
    """One client in a round or an evaluation."""

    number: int
    member: Member
    payload: Payload
    """The decoded message that the client received."""


class Shown(NamedTuple):
    """The samples of a client on which models are evaluated: all test samples, and as many training samples."""

    x: Tensor
    """The test inputs, then the training inputs."""
    y_test: Tensor
    y_train: Tensor


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A method, a problem and the clients' data."""

    algorithm: Algorithm[Any, Any, Any]
    problem: Problem
    scorer: Scorer
    clients: Sequence[ClientData]
    batch_size: int
    seed: int
    server_optimizer: ServerOptimizer | None = None
    crop_padding: int = 0
    normalization: Normalization | None = None
    examples: Sequence[int] = ()
    """The number of training samples of every client."""
    usual_cohort: int = 0
    """The size of most cohorts."""
    precision: str = "float32"
    """The precision of matrix products on a GPU."""
    loss_per_sample: bool = True
    """Whether the loss function returns the loss of every sample."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.problem.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.problem.model.parameters()).device

    def shown(self, number: int) -> Shown:
        """Return the samples of a client on which models are evaluated."""
        held = self.clients[number]
        count = min(len(held.x), max(len(held.x_test), MIN_TRAINING_SAMPLES))
        # Evenly spaced, because samples may be ordered by class.
        some = torch.arange(count, device=held.x.device) * len(held.x) // count
        return Shown(torch.cat([held.x_test, held.x[some]]), held.y_test, held.y[some])

    def scores(self, shown: Shown, outputs: Tensor) -> Scores:
        """Return the scores of a model from its outputs for the shown samples."""
        tested, trained = outputs[: len(shown.y_test)], outputs[len(shown.y_test) : len(shown.x)]
        train_loss = self.scorer.mean_loss(trained, shown.y_train.cpu())
        return {"train_loss": train_loss, **self.scorer.score(tested, shown.y_test.cpu())}

    def prepare(self, x: Tensor) -> Tensor:
        """Return a copy of raw samples as inputs of the model."""
        return inputs(x.clone(), self.normalization, self.dtype)
