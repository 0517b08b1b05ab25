"""Checks that every model passes before it is trained."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fedslr.core.errors import FedslrError
from fedslr.core.problem import Problem
from fedslr.core.targets import TARGETS
from fedslr.core.types import Loss
from fedslr.data.federation import Federation

OUTPUT_TOLERANCE = 1e-2
"""The largest difference, relative to the largest output, that rounding (TF32) explains between two outputs for the
same sample."""


class Checked(NamedTuple):
    """The findings about a model and a loss that a federation can train."""

    warnings: list[str]
    loss_per_sample: bool
    """Whether the loss returns one value per sample, and not their mean."""


def check(model: nn.Module, federation: Federation, loss: Loss) -> Checked:
    """Refuse a model or a loss that this federation cannot train."""
    _check_parameters(model)
    client = federation.clients[0]
    x = _model_inputs(model, federation, client.x[:3])
    y = client.y[:3].to(x.device)
    if y.is_floating_point():
        y = y.to(next(model.parameters()).dtype)
    outputs = _check_outputs(model, x, federation, y)
    values, warnings = _check_gradients(copy.deepcopy(model), loss, x, y)
    _check_independence_of_samples(model, x)
    # The last batch of an epoch may hold a single sample.
    _check_outputs(model, x[:1], federation, y[:1])
    if outputs.shape[-1] > federation.outputs:
        warnings.append(f"model: it outputs {outputs.shape[-1]} scores for {federation.outputs} classes")
    return Checked(warnings, values.ndim == 1)


def _model_inputs(model: nn.Module, federation: Federation, x: Tensor) -> Tensor:
    """Return a copy of some samples as the model gets them."""
    x, parameter = federation.inputs(x.clone()), next(model.parameters())
    return x.to(parameter.device, parameter.dtype if x.is_floating_point() else x.dtype)


def _check_parameters(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter) or not bool(torch.isfinite(p).all()):
            raise FedslrError(
                f"model: parameter '{name}' has no values yet, or values that are not finite (NaN or infinity); "
                "initialise it, lazy layers by running one input through the model"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise FedslrError("model: it has no trainable parameters")


@torch.no_grad()
def _check_outputs(model: nn.Module, x: Tensor, federation: Federation, y: Tensor) -> Tensor:
    """Return the outputs for some samples; refuse anything but the outputs that the task needs."""
    try:
        out: Tensor = model.eval()(x.clone())
    except Exception as error:
        kind = str(x.dtype).removeprefix("torch.")
        hint = f"; its first layer must fit inputs of shape {list(x.shape[1:])}"
        if not x.is_floating_point():
            hint = "; unless they are codes, give x as floats: x.astype('float32')"
        raise FedslrError(
            f"model: it does not take inputs of shape {list(x.shape)} and type {kind}: {_first_line(error)}{hint}"
        ) from error
    # A classifier may have scores for more classes than the data.
    more = federation.task in ("classification", "sequence")
    leading, wanted = list(y.shape if federation.task == "sequence" else y.shape[:1]), federation.outputs
    shaped = isinstance(out, Tensor) and list(out.shape[:-1]) == leading and out.ndim == len(leading) + 1
    if not shaped or not (out.shape[-1] >= wanted if more else out.shape[-1] == wanted) or not out.is_floating_point():
        found = f"{list(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise FedslrError(
            f"model: its output for {len(x)} sample(s) is {found}, expected a floating-point tensor of shape "
            f"{[*leading, wanted]}: {TARGETS[federation.task].outputs}"
        )
    return out


def _check_gradients(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, list[str]]:
    """Refuse a model whose training step has no gradient or changes buffers; return the losses and warnings."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    problem = Problem(model, loss, 0.0)
    params = {k: p.requires_grad_() for k, p in problem.params().items()}
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            value = loss(problem.outputs(params, x.clone(), train=True), y)
        grads = torch.autograd.grad(value.sum(), list(params.values()), allow_unused=True)
    except Exception as error:
        raise FedslrError(f"model: it cannot be trained with this loss: {_first_line(error)}") from error
    if value.shape not in ((), (len(x),)):
        raise FedslrError(
            f"loss: it returns shape {list(value.shape)} for {len(x)} samples; expected a value per sample, or the mean"
        )
    if changed := [name for name, b in model.named_buffers() if not torch.equal(b, buffers[name])]:
        raise FedslrError(
            f"model: its buffer '{changed[0]}' changes in training, and clients cannot average buffers; use GroupNorm "
            "instead of batch norm"
        )
    idle = [name for name, grad in zip(params, grads, strict=True) if grad is None]
    if len(idle) == len(params):
        raise FedslrError(
            "model: the loss depends on none of its parameters; register layers as attributes or in an nn.ModuleList, "
            "not in a plain list"
        )
    return value, [f"model: {', '.join(idle)} got no gradient and will only decay"] if idle else []


@torch.no_grad()
def _check_independence_of_samples(model: nn.Module, x: Tensor) -> None:
    """Refuse a model whose output for a sample depends on the other samples of its batch.

    Engines pad and regroup batches. A model that draws random numbers is not checked.
    """
    for training in (False, True):
        trial = copy.deepcopy(model).train(training)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            batch, repeated, fewer = (trial(some.clone()) for some in (x, x, x[:2]))
        tolerance = OUTPUT_TOLERANCE * float(batch.abs().max())
        if torch.equal(batch, repeated) and not torch.allclose(batch[:2], fewer, rtol=0, atol=tolerance):
            raise FedslrError(
                "model: its output for a sample depends on the other samples of the batch, as with batch norm; use "
                "GroupNorm or another layer that processes each sample by itself"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
