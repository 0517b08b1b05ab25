"""Singular value thresholding of a whole model on a GPU.

A matrix's singular values are the roots of the eigenvalues of its Gram matrix, which has the matrix's smaller side and
which a GPU decomposes several times faster than it computes a singular value decomposition. Squaring halves the digits
of small singular values, so all of it is done in double precision for matrices in single precision. Nothing is read
back but the ranks of all layers, once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedslr.matrix import LowRank, to_matrix


def threshold_all(layers: Mapping[str, Tensor], threshold: float) -> dict[str, LowRank]:
    """prox of τ‖π(·)‖_* of every layer: `prox.singular_value_threshold`, layers of one shape together."""
    groups: dict[tuple[int, int], list[str]] = {}
    matrices = {name: to_matrix(x) for name, x in layers.items()}
    for name, m in matrices.items():
        groups.setdefault((max(m.shape), min(m.shape)), []).append(name)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    counts: list[Tensor] = []
    order: list[str] = []
    for names in groups.values():
        tall = torch.stack([_tall(matrices[name]) for name in names]).double()
        values, vectors = torch.linalg.eigh(tall.mT @ tall)
        values, vectors = values.flip(-1).clamp_min(0).sqrt(), vectors.flip(-1)
        shrunk = torch.where(values > threshold, 1 - threshold / values, 0.0)
        left = tall @ vectors * shrunk[:, None, :]
        counts.append((values > threshold).sum(-1))
        order += names
        found |= {name: (left[i], vectors[i]) for i, name in enumerate(names)}
    ranks = dict(zip(order, torch.cat(counts).tolist(), strict=True))
    return {name: _factors(layers[name], matrices[name], *found[name], ranks[name]) for name in layers}


def _tall(m: Tensor) -> Tensor:
    return m if m.shape[0] >= m.shape[1] else m.mT


def _factors(x: Tensor, matrix: Tensor, left: Tensor, right: Tensor, rank: int) -> LowRank:
    """The first `rank` directions, in the layer's own precision and the right way up."""
    u, v = (side[:, :rank].to(x.dtype).contiguous() for side in (left, right))
    if matrix.shape[0] < matrix.shape[1]:
        u, v = v, u
    return LowRank(u, v, tuple(x.shape))
