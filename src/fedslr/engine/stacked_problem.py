"""The learning problem of a cohort whose gradients come from one network for all clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedslr.core.problem import gradients
from fedslr.core.types import Params
from fedslr.engine.batched import CohortProblem
from fedslr.engine.cohort_batches import PaddedBatch
from fedslr.engine.stacked import Network
from fedslr.engine.stacked_layers import side_stream

Work = Callable[..., Sequence[Tensor]]
"""A function of stacked tensors to stacked tensors."""


class _OnCohort(torch.autograd.Function):
    """A function of stacked tensors, called for one client; under `torch.vmap` it runs once for all clients."""

    @staticmethod
    def forward(work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(made[0] for made in work(*(x[None] for x in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, work: Work, *tensors: Tensor) -> Any:
        stacked = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, dims[1:], strict=True)
        ]
        made = tuple(work(*stacked))
        return made, (0,) * len(made)


class StackedProblem(CohortProblem):
    """The learning problem of a client whose losses and gradients are computed together with those of its cohort."""

    network: Network | None = None

    def loss(self, params: Params, batch: Any) -> Tensor:
        # A method that differentiates the loss itself needs the model's own graph.
        if self.network is None or torch.is_grad_enabled():
            return super().loss(params, batch)
        loss: Tensor = self._on_cohort(lambda *args: [self.cohort_losses(*args)], params, batch)[0]
        return loss

    def loss_grad(self, params: Params, batch: Any, frozen: Params | None = None) -> Params:
        if self.network is None:
            return super().loss_grad(params, batch, frozen)

        def work(whole: Params, *samples: Any) -> Sequence[Tensor]:
            return self.cohort_grads(whole, len(params), *samples)

        return dict(zip(params, self._on_cohort(work, {**params, **(frozen or {})}, batch), strict=True))

    def _on_cohort(self, work: Callable[..., Sequence[Tensor]], params: Params, batch: Any) -> Sequence[Tensor]:
        """Return what work makes of stacked parameters, inputs, labels and weights (None for a batch without)."""
        names, padded = tuple(params), isinstance(batch, PaddedBatch)
        samples = (batch.inputs, batch.labels, batch.weight) if padded else (batch.x, batch.y)

        def stacked(*tensors: Tensor) -> Sequence[Tensor]:
            values, parts = tensors[: len(names)], tensors[len(names) :]
            return work(dict(zip(names, values, strict=True)), *parts, *(() if padded else (None,)))

        made: Sequence[Tensor] = _OnCohort.apply(stacked, *params.values(), *samples)
        return made

    def cohort_outputs(self, params: Params, x: Tensor) -> Tensor:
        return super().cohort_outputs(params, x) if self.network is None else self.network(params, x)

    def cohort_losses(self, params: Params, x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        """Return the mean loss of every client's batch, from stacked parameters."""
        assert self.network is not None
        with self.products():
            outputs = self.network(params, x).to(next(iter(params.values())).dtype)
        each = torch.vmap(self.loss_function)(outputs, y)
        if weight is None:
            return each.flatten(1).mean(1) if each.ndim > 1 else each
        return (each * weight).sum(1)

    def cohort_grads(self, params: Params, free: int, x: Tensor, y: Tensor, weight: Tensor | None) -> Sequence[Tensor]:
        """Return ∇f of the first `free` parameters, every tensor with a leading axis of clients."""
        inputs = {k: v.detach().requires_grad_() if i < free else v for i, (k, v) in enumerate(params.items())}
        with self.products(), torch.enable_grad():
            loss = self.cohort_losses(inputs, x, y, weight).sum()
            grads = gradients(loss, list(inputs.values())[:free])
            side_stream.join()
        return list(grads)
