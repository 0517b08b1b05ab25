"""Models by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from fedslr.core import plugins
from fedslr.core.errors import FedslrError, suggest
from fedslr.models.networks import CNN, MLP, ResNet18, ViT

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""A function that makes a model from the shape of one input and the number of classes."""

MODELS: dict[str, ModelFactory] = {"cnn": CNN, "mlp": MLP, "resnet18": ResNet18, "vit": ViT}


def build(model: str | nn.Module, input_shape: tuple[int, ...], num_classes: int, seed: int) -> nn.Module:
    """Return a model by name with weights drawn from the seed, or a copy of a given model with its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = find_model(model)(input_shape, num_classes) if isinstance(model, str) else copy.deepcopy(model)
    if not isinstance(made, nn.Module):
        source = f" from {model}" if isinstance(model, str) else ""
        raise FedslrError(f"model: got {made!r}{source}, expected an nn.Module or the name of a model")
    return made


def find_model(name: str) -> ModelFactory:
    """Return the factory of a built-in model, or a user's own function by its `module:function`."""
    if name in MODELS:
        return MODELS[name]
    if plugins.is_name(name):
        return plugins.function("model.name", name, "input_shape", "num_classes")
    raise FedslrError(
        f"model.name: got '{name}', no such model; {suggest(name, MODELS)} (or module:function of your own)"
    )
