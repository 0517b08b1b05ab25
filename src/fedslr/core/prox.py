"""Proximal operators of the ℓ₁ norm and of the nuclear norm: prox_{τ‖·‖}(x) = argmin_z ½‖z − x‖² + τ‖z‖.

The closed forms are those of the FedSLR paper, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedslr.core import spectral
from fedslr.core.matrix import LowRank, is_matrix, to_matrix


def soft_threshold(x: Tensor, threshold: Any) -> Tensor:
    """Return prox_{τ‖·‖₁}(x) = sign(x)·max(|x| − τ, 0), where τ is a number or a tensor; zeros are exact."""
    return x - x.clamp(-threshold, threshold)


def singular_value_threshold(x: Tensor, threshold: float) -> LowRank:
    """Return the factors of prox_{τ‖π(·)‖_*}(x) = U diag(max(σ − τ, 0)) Vᵀ, where π(x) = U diag(σ) Vᵀ.

    The factors contain no direction with σ ≤ τ, so their rank is the exact rank of the result.
    """
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    rank = int((s > threshold).sum())
    return LowRank((u[:, :rank] * (s[:rank] - threshold)).contiguous(), vh[:rank].mT.contiguous(), tuple(x.shape))


def nuclear_norm(x: Tensor) -> Tensor:
    """Return ‖π(x)‖_*, the sum of the singular values."""
    values: Tensor = torch.linalg.svdvals(to_matrix(x))
    return values.sum()


def low_rank(
    params: dict[str, Tensor], threshold: float, last: Mapping[str, Tensor | LowRank] | None = None
) -> dict[str, Tensor | LowRank]:
    """Apply singular value thresholding to every layer of a model.

    Args:
        params: The parameters of a model.
        threshold: The threshold τ.
        last: The result for similar parameters, such as those of the previous round. It speeds the computation up on a
            GPU and does not change the result.

    Returns:
        Low-rank factors for every matrix; one-dimensional parameters unchanged.
    """
    layers = {k: x for k, x in params.items() if is_matrix(x)}
    if layers and all(x.is_cuda and x.dtype == torch.float32 for x in layers.values()):
        return {**params, **spectral.threshold_all(layers, threshold, last)}
    return {**params, **{k: singular_value_threshold(x, threshold) for k, x in layers.items()}}
