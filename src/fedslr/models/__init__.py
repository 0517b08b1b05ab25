"""Models by name, and the check every model passes before it is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from fedslr.core import plugins
from fedslr.core.errors import FedslrError, suggest
from fedslr.models.cnn import CNN
from fedslr.models.mlp import MLP
from fedslr.models.resnet import ResNet18
from fedslr.models.vit import ViT

MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn": CNN,
    "mlp": MLP,
    "resnet18": ResNet18,
    "vit": ViT,
}


def build(model: str | nn.Module, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A model by name with weights drawn from the seed, or a copy of the given one, whose weights are the start."""
    if isinstance(model, nn.Module):
        try:
            return copy.deepcopy(model)
        except Exception as error:
            raise FedslrError(f"model: it cannot be copied: {first_line(error)}") from error
    if not isinstance(model, str):
        raise FedslrError(f"model: got {model!r}, expected a name or an nn.Module")
    return make(model, shape, classes, seed)


def make(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A model by name for inputs of a shape, with weights drawn from the seed."""
    maker = find(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = maker(shape, classes)
    if not isinstance(made, nn.Module):
        raise FedslrError(f"model.name: '{name}' gave a {type(made).__name__}, expected an nn.Module")
    return made


def find(name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    """What makes a model of this name from the shape of an input and the number of classes."""
    if name in MODELS:
        return MODELS[name]
    if plugins.is_name(name):
        return plugins.load("model.name", name)
    raise FedslrError(
        f"model.name: got '{name}', no such model; {suggest(name, MODELS)} (or module:function of your own)"
    )


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
