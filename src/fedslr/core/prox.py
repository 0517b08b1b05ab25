"""Proximal operators and the norms they belong to: prox_{τ‖·‖}(x) = argmin_z ½‖z − x‖² + τ‖z‖.

The closed forms of appendix A.1 of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedslr.core import spectral
from fedslr.core.matrix import LowRank, is_matrix, to_matrix


def soft_threshold(x: Tensor, threshold: Any) -> Tensor:
    """prox of τ‖·‖₁: sign(x)·max(|x| − τ, 0), τ a number or a tensor. Zeros are exact."""
    return x - x.clamp(-threshold, threshold)


def l1_norm(x: Tensor) -> Tensor:
    """‖x‖₁."""
    return x.abs().sum()


def singular_value_threshold(x: Tensor, threshold: float) -> LowRank:
    """prox of τ‖π(·)‖_*: the singular values soft-thresholded, U diag(max(σ − τ, 0)) Vᵀ, as factors.

    Directions at or below the threshold are left out, so the rank of the result is counted, not estimated.
    """
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    rank = int((s > threshold).sum())
    return LowRank((u[:, :rank] * (s[:rank] - threshold)).contiguous(), vh[:rank].mT.contiguous(), tuple(x.shape))


def nuclear_norm(x: Tensor) -> Tensor:
    """‖π(x)‖_*: the sum of the singular values."""
    values: Tensor = torch.linalg.svdvals(to_matrix(x))
    return values.sum()


def low_rank(
    params: dict[str, Tensor], threshold: float, last: Mapping[str, Tensor | LowRank] | None = None
) -> dict[str, Tensor | LowRank]:
    """Apply singular value thresholding to every layer; return one-dimensional parameters unchanged.

    `last` is the result for similar parameters, if there is one. On a GPU it makes the computation faster.
    """
    layers = {k: x for k, x in params.items() if is_matrix(x)}
    if layers and all(x.is_cuda and x.dtype == torch.float32 for x in layers.values()):
        return {**params, **spectral.threshold_all(layers, threshold, last)}
    return {**params, **{k: singular_value_threshold(x, threshold) for k, x in layers.items()}}
