"""Proximal operators of the ℓ₁ norm and of the nuclear norm: prox_{τ‖·‖}(x) = argmin_z ½‖z − x‖² + τ‖z‖.

The closed forms are those of the FedSLR paper, appendix A.1. The best approximation of a rank is the proximal operator
of the constraint rank(π(z)) ≤ r.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedslr.core import spectral
from fedslr.core.matrix import LowRank, full_ranks, is_matrix, to_matrix


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


def best_approximation(x: Tensor, rank: int) -> LowRank:
    """Return the factors of the matrix of this rank that is closest to π(x), by its singular value decomposition."""
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    return LowRank((u[:, :rank] * s[:rank]).contiguous(), vh[:rank].mT.contiguous(), tuple(x.shape))


def best_approximations(params: dict[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Tensor | LowRank]:
    """Return a model whose layers have at most these ranks; layers of full rank and other parameters are unchanged."""
    full = full_ranks(params)
    layers = {k: x for k, x in params.items() if ranks.get(k, 0) < full.get(k, 0)}
    gram = all(x.is_cuda and x.dtype == torch.float32 for x in layers.values())
    approximate = spectral.truncate if gram else best_approximation
    return {**params, **{k: approximate(x, ranks[k]) for k, x in layers.items()}}
