"""Models by name, and the check every model passes before it is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from fedslr.data.federation import Federation
from fedslr.errors import FedslrError, suggest
from fedslr.models.cnn import CNN
from fedslr.models.resnet import ResNet18

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"cnn": CNN, "resnet18": ResNet18}


def build(model: str | nn.Module, federation: Federation, seed: int) -> nn.Module:
    """A model by name with weights drawn from the seed, or a copy of the given one, whose weights are the start."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if model not in MODELS:
        raise FedslrError(f"model.name: got '{model}', no such model; {suggest(model, MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[model](federation.input_shape, federation.num_classes)


def check(model: nn.Module, federation: Federation) -> None:
    """Refuse what cannot be trained by a federation, in plain words."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise FedslrError("model: it has lazy layers without weights; run one input through it first")
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise FedslrError(
                f"model: '{name}' ({type(module).__name__}) keeps running statistics in buffers, which clients with "
                "different data cannot average; use GroupNorm"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise FedslrError("model: it has no trainable parameters")
    sample = federation.clients[0].x[:2]
    first = next(model.parameters())
    sample = sample.to(first.device, first.dtype if sample.is_floating_point() else sample.dtype)
    try:
        with torch.no_grad():
            out = model.eval()(sample)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FedslrError(f"model: it does not take inputs of shape {list(sample.shape)}: {reason}") from error
    if not isinstance(out, torch.Tensor) or out.ndim != 2 or out.shape[1] < federation.num_classes:
        shape = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise FedslrError(
            f"model: it answers {len(sample)} inputs with {shape}, expected [{len(sample)}, {federation.num_classes}] "
            "(one score per class)"
        )
