"""All clients of a cohort in one go: `torch.vmap` over their states, data and models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.data.cohort import CohortBatches, CohortData, Shape
from fedslr.engine.eager import Eager
from fedslr.types import Batch, Params, Payload, Round, Task


class Together(NamedTuple):
    """What a cohort made of a round: every tensor has a leading axis of clients."""

    states: Any
    uploads: Payload

    def one(self, slot: int) -> tuple[Any, Payload]:
        """What one client made of it."""
        mine: tuple[Any, Payload] = pytree.tree_map(lambda x: x[slot].clone(), tuple(self))
        return mine


class CohortTask(Task):
    """The learning problem of one client inside `torch.vmap`: gradients are functions of functions."""

    def loss(self, params: Params, batch: Any) -> Tensor:
        return self.mean_loss(self.outputs(params, batch.x, train=True), batch)

    def mean_loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """The mean over a batch's own samples: that of the loss itself where nothing fills the batch."""
        if isinstance(batch, Batch) or not self.filled:
            return self.loss_function(outputs, batch.y)
        each = torch.vmap(lambda out, y: self.loss_function(out[None], y[None]))(outputs, batch.y)
        return (each * batch.weight).sum()

    filled = False
    """Whether batches may hold samples that are only there to fill them."""

    def loss_grad(self, params: Params, batch: Any, frozen: Params | None = None) -> Params:
        def loss(params: Params) -> Tensor:
            return self.loss({**params, **frozen} if frozen else params, batch)

        grads: Params = torch.func.grad(loss)(params)
        return grads


def stack(trees: Sequence[Any]) -> Any:
    """Trees of one shape as one tree whose tensors have a leading axis."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


class Batched(Eager):
    """Runs a method's `local_update` once for the whole cohort.

    Numbers are those of the eager engine up to rounding. Methods that look at their numbers, and models that draw
    random numbers, cannot be run this way.
    """

    task_kind: type[CohortTask] = CohortTask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device = self.clients[0].y.device
        self.shape = Shape.of([len(c.y) for c in self.clients], self.batch_size)
        self.together = self.task_kind(self.task.model, self.task.loss_function, self.task.weight_decay)
        self.together.filled = self.shape.ragged
        self._batches: dict[int, CohortBatches] = {}

    def train(
        self, cohort: Sequence[int], states: Sequence[Any], payloads: Sequence[Payload], round: Round
    ) -> Together:
        """The cohort's work of a round."""
        batches = self._turn_to(cohort, round)
        shared = all(payload is payloads[0] for payload in payloads)
        payload = payloads[0] if shared else stack(payloads)
        return self._run(batches, stack(states), payload, shared, round)

    def _turn_to(self, cohort: Sequence[int], round: Round) -> CohortBatches:
        batches = self._batches.get(len(cohort))
        if batches is None:
            batches = CohortBatches(
                self.shape, self.seed, self.crop_padding, self.normalization, self.dtype, self.device
            )
            self._batches[len(cohort)] = batches
        batches.show(cohort, [self.clients[c] for c in cohort], int(round.number))
        return batches

    def _run(self, batches: CohortBatches, states: Any, payload: Payload, shared: bool, round: Round) -> Together:
        def one(slot: Tensor, state: Any, payload: Payload) -> tuple[Any, Payload]:
            data = CohortData(batches, slot)
            return self.algorithm.local_update(self.together, state, payload, data, round)

        slots = torch.arange(len(batches.cohort), device=self.device)
        with torch.no_grad():
            made = torch.vmap(one, in_dims=(0, 0, None if shared else 0))(slots, states, payload)
        return Together(*made)
