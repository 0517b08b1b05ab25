"""π: a layer's tensor seen as a matrix, and low-rank factors of that matrix.

A convolution's weight (o, i, d₁, d₂) becomes the matrix (o·d₁, i·d₂), "scheme 2" of Idelbayev & Carreira-Perpiñán,
Low-rank compression of neural nets (CVPR 2020): swap axes 1 and 2, then reshape. A linear weight is its own matrix.
Kernels with another number of axes follow the same idea: the first half of them joins the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor


def is_matrix(tensor: Tensor) -> bool:
    """Return whether a parameter is treated as a matrix; norm scales and biases are not, and are sent dense."""
    return tensor.ndim >= 2


def _axes(ndim: int) -> tuple[list[int], int]:
    """Return the axes of the rows followed by those of the columns, and the number of axes of the rows."""
    kernel = list(range(2, ndim))
    half = (len(kernel) + 1) // 2
    return [0, *kernel[:half], 1, *kernel[half:]], 1 + half


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of π(x) for a tensor of this shape."""
    axes, rows = _axes(len(shape))
    sizes = [shape[a] for a in axes]
    return prod(sizes[:rows]), prod(sizes[rows:])


def to_matrix(tensor: Tensor) -> Tensor:
    """Return π(tensor)."""
    axes, _ = _axes(tensor.ndim)
    return tensor.permute(axes).reshape(matrix_shape(tuple(tensor.shape)))


def from_matrix(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return π⁻¹(matrix)."""
    axes, _ = _axes(len(shape))
    inverse = [axes.index(a) for a in range(len(shape))]
    return matrix.reshape([shape[a] for a in axes]).permute(inverse).contiguous()


class LowRank(NamedTuple):
    """A tensor given as factors: π(tensor) = u vᵀ, with as many columns as its rank."""

    u: Tensor
    v: Tensor
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.u.shape[1]

    @property
    def numbers(self) -> int:
        """The number of entries of both factors."""
        return self.u.numel() + self.v.numel()

    def dense(self) -> Tensor:
        return from_matrix(self.u @ self.v.mT, self.shape)


def dense(tree: Mapping[str, Tensor | LowRank]) -> dict[str, Tensor]:
    """Return a model with every tensor dense."""
    return {k: x.dense() if isinstance(x, LowRank) else x for k, x in tree.items()}
