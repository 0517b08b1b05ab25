"""The learning problem that methods ask for gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedslr.core.optimizers import PLAIN_SGD, LocalSteps
from fedslr.core.types import Batch, Loss, Params


@contextmanager
def _as_tf32() -> Iterator[None]:
    """Let a GPU round single-precision products to TF32 within the block."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [b.allow_tf32 for b in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = True
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def gradients(loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ∂loss/∂x for every wanted x: zeros if the loss does not depend on x, as for an unused head."""
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


class Problem:
    """The learning problem of a run: a model, a loss f and a weight decay wd. Methods ask it for gradients.

    Args:
        model: The model. Its own parameters are not changed: every function takes the parameters as an argument.
        loss: A function of the outputs and the targets of a batch that returns the loss of every sample, or the mean
            loss.
        weight_decay: The weight of ½‖v‖² in every local loss.
        steps: The optimizer of `descend` and its bound on gradients; plain SGD by default.
        personal_steps: The same for the personal phase; like `steps` by default.

    Example:
        g = problem.grad(v, batch)  # ∇f(v; batch) + wd·v
        v = {k: x - round.lr * g[k] for k, x in v.items()}
    """

    tf32 = False
    """Whether a GPU may round products in the model's gradients to TF32. A method's own products, such as those of
    low-rank factors, are always computed in full precision."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        weight_decay: float,
        steps: LocalSteps = PLAIN_SGD,
        personal_steps: LocalSteps | None = None,
    ) -> None:
        self.model = model
        self.loss_function = loss
        self.weight_decay = weight_decay
        self.steps, self.personal_steps = steps, personal_steps or steps
        self._slots = self._find_slots()

    def in_personal_phase(self) -> Self:
        """Return this problem with the optimizer of the personal phase."""
        personal = copy.copy(self)
        personal.steps = self.personal_steps
        return personal

    def _find_slots(self) -> list[tuple[dict[str, Any], str, str]]:
        """Return the places in which the model looks up its trainable parameters; a shared parameter has several."""
        names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        return [
            (module._parameters, key, names[p])
            for module in self.model.modules()
            for key, p in module._parameters.items()
            if p is not None and p in names
        ]

    def params(self) -> Params:
        """Return a copy of the model's own trainable parameters."""
        return {k: p.detach().clone() for k, p in self.model.named_parameters() if p.requires_grad}

    def outputs(self, params: Params, x: Tensor, train: bool = False) -> Tensor:
        """Return the model's outputs for inputs x, with these parameters, in evaluation or training mode."""
        if self.model.training != train:
            self.model.train(train)
        # torch.func.functional_call would search for the slots again: 7 % of a small model's step.
        own = [table[key] for table, key, _ in self._slots]
        try:
            for table, key, name in self._slots:
                table[key] = params[name]
            out: Tensor = self.model(x)
            return out
        finally:
            for (table, key, _), p in zip(self._slots, own, strict=True):
                table[key] = p

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the mean loss f(params; batch), without weight decay."""
        return self.loss_function(self.outputs(params, batch.x, train=True), batch.y).mean()

    def loss_sum(self, params: Params, batch: Batch) -> Tensor:
        """Return the sum of the losses of a batch's samples, without weight decay."""
        return self.loss(params, batch) * len(batch.y)

    def loss_grad(self, params: Params, batch: Batch, frozen: Params | None = None) -> Params:
        """Return the gradient of the loss, ∇f(params; batch), without weight decay.

        Args:
            params: The parameters to differentiate by.
            batch: The inputs and labels.
            frozen: The other parameters of the model, if `params` are only a part of them.
        """
        free = {k: v.detach().requires_grad_() for k, v in params.items()}
        with self.products(), torch.enable_grad():
            loss = self.loss({**free, **frozen} if frozen else free, batch)
            grads = gradients(loss, list(free.values()))
        return dict(zip(free, grads, strict=True))

    def products(self) -> AbstractContextManager[None]:
        """Return a context in which products have the precision of the model's gradients."""
        return _as_tf32() if self.tf32 else nullcontext()

    def grad(self, params: Params, batch: Batch, frozen: Params | None = None) -> Params:
        """Return the gradient with weight decay, ∇f(params; batch) + wd·params; arguments as for `loss_grad`."""
        grads = self.loss_grad(params, batch, frozen)
        return {k: g.add(params[k], alpha=self.weight_decay) for k, g in grads.items()}
