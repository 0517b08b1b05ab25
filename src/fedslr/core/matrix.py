"""The matrix π(x) of a layer's tensor x, and its low-rank factors.

A convolution's weight (o, i, d₁, d₂) becomes the matrix (o·d₁, i·d₂), "scheme 2" of Idelbayev & Carreira-Perpiñán,
Low-rank compression of neural nets (CVPR 2020): swap axes 1 and 2, then reshape. A linear weight is its own matrix.
For other numbers of kernel axes, the first half of the kernel axes joins the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor


def is_matrix(tensor: Tensor) -> bool:
    """Return whether a parameter is treated as a matrix. Scales of norms and biases are not; they are sent dense."""
    return tensor.ndim >= 2


def _axes(ndim: int) -> tuple[list[int], int]:
    """Return the axes of the rows followed by the axes of the columns, and the number of row axes."""
    kernel = list(range(2, ndim))
    half = (len(kernel) + 1) // 2
    return [0, *kernel[:half], 1, *kernel[half:]], 1 + half


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of π(x) for a tensor of this shape."""
    axes, rows = _axes(len(shape))
    sizes = [shape[a] for a in axes]
    return prod(sizes[:rows]), prod(sizes[rows:])


def full_ranks(params: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the full rank min(m, n) of the matrix π(x) of every layer that is one."""
    return {name: min(matrix_shape(tuple(x.shape))) for name, x in params.items() if is_matrix(x)}


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
    """A tensor as low-rank factors: π(tensor) = u vᵀ, where u and v have as many columns as the rank."""

    u: Tensor
    v: Tensor
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of columns of both factors."""
        return self.u.shape[1]

    @property
    def numbers(self) -> int:
        """The number of entries of both factors."""
        return self.u.numel() + self.v.numel()

    def dense(self) -> Tensor:
        """Return the tensor π⁻¹(u vᵀ)."""
        return from_matrix(self.u @ self.v.mT, self.shape)


def dense(tree: Mapping[str, Tensor | LowRank]) -> dict[str, Tensor]:
    """Return a model with dense tensors in place of all factors."""
    return {k: x.dense() if isinstance(x, LowRank) else x for k, x in tree.items()}
