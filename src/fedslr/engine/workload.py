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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A method, a problem and the clients' data."""

    algorithm: Algorithm[Any, Any, Any]
    problem: Problem
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
    loss_is_mean: bool = True
    """Whether the loss of a batch is known to be the mean of its samples' losses."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.problem.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.problem.model.parameters()).device

    def prepare(self, x: Tensor) -> Tensor:
        """Return a copy of raw samples as inputs of the model."""
        return inputs(x.clone(), self.normalization, self.dtype)
