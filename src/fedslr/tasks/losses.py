"""Losses by name. A loss is a function of outputs and targets that returns the loss of every sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedslr.core import plugins
from fedslr.core.errors import FedslrError, suggest
from fedslr.core.targets import IGNORED
from fedslr.core.types import Loss


@cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor that is made once, because a recorded graph cannot copy from the CPU."""
    return torch.tensor(values, dtype=dtype, device=device)


def cross_entropy(outputs: Tensor, labels: Tensor, weights: Sequence[float] = (), smoothing: float = 0.0) -> Tensor:
    """Return −log of the softmax probability of every label; of a sequence, the mean over its labelled tokens."""
    weight = _constant(tuple(weights), outputs.dtype, outputs.device) if weights else None
    each = F.cross_entropy(
        outputs.movedim(-1, 1), labels, weight, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    return each if labels.ndim == 1 else each.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def binary_cross_entropy(
    outputs: Tensor, labels: Tensor, weights: Sequence[float] = (), smoothing: float = 0.0
) -> Tensor:
    """Return the log loss of every sample's logit, or its mean over several labels; weights are those of label 1."""
    targets = _alike(labels.to(outputs.dtype), outputs) * (1 - smoothing) + smoothing / 2
    weight = _constant(tuple(weights), outputs.dtype, outputs.device) if weights else None
    each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none", pos_weight=weight)
    return each.flatten(1).mean(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of every sample, the mean over its targets."""
    return _errors(outputs, targets).square().flatten(1).mean(1)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the absolute error of every sample, the mean over its targets."""
    return _errors(outputs, targets).abs().flatten(1).mean(1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Huber loss of every sample with δ = 1, the mean over its targets."""
    return F.huber_loss(outputs, _alike(targets, outputs), reduction="none").flatten(1).mean(1)


def _alike(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets in the shape of the outputs: one number per sample may lack the last axis."""
    return targets.reshape(outputs.shape)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs - _alike(targets, outputs)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": cross_entropy,
    "bce": binary_cross_entropy,
    "mse": squared_error,
    "mae": absolute_error,
    "huber": huber,
}

WEIGHTED = ("cross_entropy", "bce")
"""The losses that take class weights and label smoothing."""


def find(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """Return a built-in loss with its options, or a user's own function by its `module:function`.

    Args:
        name: The name.
        options: `weights` and `smoothing`, for losses that take them; empty and zero values stand for none.
    """
    given = {key: value for key, value in (options or {}).items() if value}
    if given and name not in WEIGHTED:
        raise FedslrError(f"loss: '{name}' takes no {' or '.join(given)}; choose {' or '.join(WEIGHTED)}")
    if name in LOSSES:
        return partial(LOSSES[name], **given) if given else LOSSES[name]
    if not plugins.is_name(name):
        raise FedslrError(f"loss: got '{name}', no such loss; {suggest(name, LOSSES)} (or module:function of your own)")
    return plugins.function("loss", name, "outputs", "targets")
