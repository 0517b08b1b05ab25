"""Checks that every model passes before it is trained."""

from __future__ import annotations

import contextlib
import copy
from itertools import islice

import torch
from torch import nn

from fedslr.core.errors import FedslrError
from fedslr.core.problem import Task
from fedslr.core.types import Loss
from fedslr.data.federation import Federation
from fedslr.models import first_line

SEEN = 50
"""Clients that are looked at for samples to try a model with, at most."""


CLOSE = 1e-4
"""How far, relative to the largest, answers to a sample may be apart that should be the same."""


def check(model: nn.Module, federation: Federation, loss: Loss) -> list[str]:
    """Refuse, in plain words, what cannot be trained by a federation; what a person may want to know otherwise."""
    _check_parameters(model)
    x = shown(model, federation, federation.clients[0].x[:2].clone())
    y = federation.clients[0].y[:2].to(x.device)
    try:
        with torch.no_grad():
            out = model.eval()(x.clone())
    except Exception as error:
        kind = str(x.dtype).removeprefix("torch.")
        floats = "" if x.is_floating_point() else "; unless they are codes, give x as floats: x.astype('float32')"
        raise FedslrError(
            f"model: it does not take inputs of shape {list(x.shape)} and type {kind}: {first_line(error)}{floats}"
        ) from error
    _check_scores(out, len(x), federation.num_classes)
    # A last batch may have a single sample.
    single = None
    with torch.no_grad(), contextlib.suppress(Exception):
        single = model(x[:1].clone())
    if single is not None:
        _check_scores(single, 1, federation.num_classes)
    told = _try_to_train(copy.deepcopy(model).train(), loss, x, y)
    _check_samples_are_apart(model, federation)
    if out.shape[1] > federation.num_classes:
        told.append(f"model: it gives {out.shape[1]} scores where there are {federation.num_classes} classes")
    return told


def _check_scores(out: object, samples: int, classes: int) -> None:
    found = type(out).__name__
    if isinstance(out, torch.Tensor):
        if out.ndim == 2 and len(out) == samples and out.shape[1] >= classes and out.is_floating_point():
            return
        found = f"{list(out.shape)} of {out.dtype}"
    inputs = "1 input" if samples == 1 else f"{samples} inputs"
    raise FedslrError(f"model: it answers {inputs} with {found}, expected [{samples}, {classes}] (one score per class)")


def shown(model: nn.Module, federation: Federation, x: torch.Tensor) -> torch.Tensor:
    """Some samples as a model is shown them."""
    x, first = federation.inputs(x), next(model.parameters())
    return x.to(first.device, first.dtype if x.is_floating_point() else x.dtype)


def works_in_place(model: nn.Module, federation: Federation) -> bool:
    """Whether a model changes what it is shown, as a first layer with inplace=True does."""
    x = shown(model, federation, federation.clients[0].x[:2].clone())
    given = x.clone()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        copy.deepcopy(model).train()(given)
    return not torch.equal(x, given)


def _check_parameters(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise FedslrError("model: it has lazy layers without weights; run one input through it first")
        if p.is_complex():
            raise FedslrError(f"model: '{name}' is complex; give its real and imaginary parts as two parameters")
        if not bool(torch.isfinite(p).all()):
            raise FedslrError(f"model: '{name}' has weights that are not finite (NaN or infinity)")
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise FedslrError(
                f"model: '{name}' ({type(module).__name__}) keeps running statistics in buffers, which clients with "
                "different data cannot average; use GroupNorm"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise FedslrError("model: it has no trainable parameters")


def _check_samples_are_apart(model: nn.Module, federation: Federation) -> None:
    """Refuse a model whose answer to a sample depends on the others of its batch, which is no property of a sample.

    Batches are of any size, and engines cut and fill them as they like.
    """
    held: list[torch.Tensor] = []
    for client in islice(federation.clients, SEEN):
        held += [x for x in client.x[:3] if not held or x.shape == held[0].shape]
        if len(held) >= 3:
            break
    if len(held) < 3:
        return
    x = shown(model, federation, torch.stack(held[:3])).cpu()
    for training in (False, True):
        # A GPU may round batches of other sizes otherwise, to ten bits.
        tried = copy.deepcopy(model).cpu().train(training)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                all_of_them, some = tried(x.clone()), tried(x[:2].clone())
            except Exception:  # a model that cannot be run says so elsewhere, and better
                continue
            draws = not torch.equal(before, torch.get_rng_state())
        scale = float(all_of_them.abs().max())
        # Of models that draw numbers nobody can compare the answers.
        if not draws and not torch.allclose(all_of_them[:2], some, rtol=0, atol=CLOSE * scale):
            raise FedslrError(
                "model: its answer to a sample depends on the other samples of the batch, as batch norm's does; use "
                "GroupNorm, or whatever looks at one sample at a time"
            )


def _try_to_train(model: nn.Module, loss: Loss, x: torch.Tensor, y: torch.Tensor) -> list[str]:
    """One step on a copy: the loss is one number, gradients are there, and buffers stay as they are."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    task = Task(model, loss, 0.0)
    free = {k: p.requires_grad_() for k, p in task.params().items()}
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            value = loss(task.outputs(free, x.clone(), train=True), y)
        if value.ndim != 0:
            raise FedslrError(f"loss: it gives {list(value.shape)} numbers, expected one, the mean over the batch")
        grads = torch.autograd.grad(value, list(free.values()), allow_unused=True)
    except FedslrError:
        raise
    except Exception as error:
        raise FedslrError(f"model: it cannot be trained with this loss: {first_line(error)}") from error
    for name, b in model.named_buffers():
        if not torch.equal(b, buffers[name]):
            raise FedslrError(f"model: its buffer '{name}' changes in training, and clients cannot share it")
    if any(g is not None and g.layout != torch.strided for g in grads):
        raise FedslrError("model: it has sparse gradients, which cannot be averaged; use dense ones (sparse=False)")
    if all(g is None for g in grads):
        raise FedslrError(
            "model: none of its parameters has a gradient; are they used from somewhere else, a list say?"
        )
    idle = [name for name, g in zip(free, grads, strict=True) if g is None]
    return [f"model: {', '.join(idle)} got no gradient and will only decay"] if idle else []
