"""π and its inverse."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedslr.core.matrix import LowRank, dense, from_matrix, matrix_shape, to_matrix

shapes = st.lists(st.integers(1, 4), min_size=2, max_size=6).map(tuple)


@given(shapes)
def test_round_trip(shape):
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    matrix = to_matrix(x)
    assert tuple(matrix.shape) == matrix_shape(shape)
    assert torch.equal(from_matrix(matrix, shape), x)


def test_a_convolution_joins_its_first_kernel_axis_to_the_outputs():
    """Entry (o·d₁, i·d₂) of the matrix is weight[o, i, d₁, d₂]."""
    x = torch.randn(5, 4, 3, 2)
    matrix = to_matrix(x)
    assert matrix.shape == (15, 8)
    for o in range(5):
        for i in range(4):
            for a in range(3):
                for b in range(2):
                    assert matrix[o * 3 + a, i * 2 + b] == x[o, i, a, b]


def test_a_linear_weight_is_its_own_matrix():
    x = torch.randn(5, 4)
    assert torch.equal(to_matrix(x), x)


def test_factors_multiply_out():
    u, v = torch.randn(15, 2), torch.randn(8, 2)
    factors = LowRank(u, v, (5, 4, 3, 2))
    assert torch.equal(to_matrix(factors.dense()), u @ v.T)
    assert (factors.rank, factors.numbers) == (2, 46)
    assert torch.equal(dense({"a": factors, "b": u})["b"], u)
