"""Proximal operators obey their laws: optimality, Moreau's identity, non-expansiveness."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedslr.core import prox, spectral
from fedslr.core.matrix import to_matrix

SHAPES = [(7, 5), (3, 8), (4, 3, 3, 2), (6, 6)]
seeds = st.integers(0, 10_000)
thresholds = st.floats(0, 3)


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def soft(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return prox.soft_threshold(x, threshold)


def svt(x: torch.Tensor, threshold: float) -> torch.Tensor:
    return prox.singular_value_threshold(x, threshold).dense()


OPERATORS = [(soft, lambda x: x.abs().sum()), (svt, prox.nuclear_norm)]
both = pytest.mark.parametrize(("operator", "norm"), OPERATORS, ids=["l1", "nuclear"])


@both
@settings(max_examples=30, deadline=None)
@given(seed=seeds, threshold=thresholds, shape=st.sampled_from(SHAPES))
def test_nothing_nearby_is_better(operator, norm, seed, threshold, shape):
    """prox(x) minimises ½‖z − x‖² + τ‖z‖: no perturbed point has a lower value."""
    x = random(shape, seed)

    def objective(z: torch.Tensor) -> float:
        return float(0.5 * (z - x).square().sum() + threshold * norm(z))

    z = operator(x, threshold)
    best = objective(z)
    for k in range(8):
        for size in (1e-3, 1e-1, 1.0):
            assert objective(z + size * random(shape, seed + k + 1)) >= best - 1e-10
    assert objective(x) >= best - 1e-10
    assert objective(torch.zeros_like(x)) >= best - 1e-10


def by_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def by_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.mT


@pytest.mark.parametrize(("operator", "product"), [(soft, by_elements), (svt, by_rows)], ids=["l1", "nuclear"])
@pytest.mark.parametrize("threshold", [0.2, 0.9])
def test_agrees_with_a_numerical_minimiser(operator, product, threshold):
    """Both norms are minima over factorisations, ‖z‖ = min_{z = a∘b} ½(‖a‖² + ‖b‖²), which is smooth."""
    x = random((4, 4), 5)

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        free = torch.tensor(flat.reshape(2, 4, 4), requires_grad=True)
        value = 0.5 * (product(*free) - x).square().sum() + threshold / 2 * free.square().sum()
        (gradient,) = torch.autograd.grad(value, free)
        return float(value.detach()), gradient.numpy().ravel()

    start = random((2, 4, 4), 6).numpy().ravel()
    found = scipy.optimize.minimize(
        value_and_gradient, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10}
    )
    minimiser = product(*torch.tensor(found.x.reshape(2, 4, 4)))
    assert (operator(x, threshold) - minimiser).abs().max() < 1e-5


@both
@settings(max_examples=40, deadline=None)
@given(seed=seeds, threshold=st.floats(0, 3), shape=st.sampled_from(SHAPES))
def test_non_expansive(operator, norm, seed, threshold, shape):
    """‖prox(x) − prox(y)‖ ≤ ‖x − y‖, and firmly: ‖prox(x) − prox(y)‖² ≤ ⟨prox(x) − prox(y), x − y⟩."""
    x, y = random(shape, seed), random(shape, seed + 1)
    gap = operator(x, threshold) - operator(y, threshold)
    assert gap.norm() <= (x - y).norm() + 1e-12
    assert gap.square().sum() <= (gap * (x - y)).sum() + 1e-10


@settings(max_examples=40, deadline=None)
@given(seed=seeds, threshold=st.floats(1e-3, 3), shape=st.sampled_from(SHAPES))
def test_moreau(seed, threshold, shape):
    """x = prox_{τ‖·‖}(x) + projection of x on the dual norm's ball of radius τ (Moreau)."""
    x = random(shape, seed)
    assert torch.allclose(soft(x, threshold) + x.clamp(-threshold, threshold), x, atol=1e-12)
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    projected = u @ torch.diag(s.clamp(max=threshold)) @ vh
    assert torch.allclose(to_matrix(svt(x, threshold)) + projected, to_matrix(x), atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, threshold=st.floats(0.05, 3), shape=st.sampled_from(SHAPES))
def test_rank_is_counted(seed, threshold, shape):
    """The rank of the factors is the number of singular values above the threshold, and the matrix has that rank."""
    x = random(shape, seed)
    factors = prox.singular_value_threshold(x, threshold)
    assert factors.rank == int((torch.linalg.svdvals(to_matrix(x)) > threshold).sum())
    kept = torch.linalg.svdvals(to_matrix(factors.dense()))
    assert int((kept > 1e-12).sum()) == factors.rank or (kept[: factors.rank] < 1e-9).any()
    assert factors.dense().shape == x.shape


def test_known_answers():
    x = torch.tensor([-3.0, -1.0, -0.2, 0.0, 0.2, 1.0, 3.0])
    assert prox.soft_threshold(x, 1.0).tolist() == [-2, 0, 0, 0, 0, 0, 2]
    assert prox.soft_threshold(x, torch.tensor(1.0)).tolist() == [-2, 0, 0, 0, 0, 0, 2]
    diagonal = torch.diag(torch.tensor([5.0, 2.0, 0.5]))
    thresholded = prox.singular_value_threshold(diagonal, 1.0)
    assert thresholded.rank == 2
    assert torch.allclose(thresholded.dense(), torch.diag(torch.tensor([4.0, 1.0, 0.0])), atol=1e-6)


def test_everything_thresholded_away_has_rank_zero():
    gone = prox.singular_value_threshold(random((4, 3, 3, 2), 0), 1e3)
    assert gone.rank == 0
    assert gone.numbers == 0
    assert not gone.dense().any()


def test_low_rank_leaves_vectors_alone():
    params = {"weight": random((5, 4), 0), "bias": random((5,), 1)}
    out = prox.low_rank(params, 0.5)
    assert out["bias"] is params["bias"]
    assert out["weight"].rank <= 4


@settings(max_examples=30, deadline=None)
@given(seed=seeds, rank=st.integers(0, 9), shape=st.sampled_from(SHAPES))
def test_the_best_approximation_leaves_only_the_smaller_singular_values(seed, rank, shape):
    """Eckart and Young: the closest matrix of rank r is as far away as the norm of the smaller singular values."""
    x = random(shape, seed)
    found, values = prox.best_approximation(x, rank), np.linalg.svd(to_matrix(x).numpy(), compute_uv=False)
    assert found.rank == min(rank, len(values))
    assert float((found.dense() - x).norm()) == pytest.approx(np.linalg.norm(values[rank:]), abs=1e-12)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, rank=st.integers(1, 3), shape=st.sampled_from(SHAPES))
def test_the_gpus_best_approximation_is_the_same(seed, rank, shape):
    x = random(shape, seed)
    assert torch.allclose(spectral.truncate(x, rank).dense(), prox.best_approximation(x, rank).dense(), atol=1e-8)


def test_layers_of_full_rank_and_vectors_stay_as_they_are():
    params = {"a": random((7, 5), 0), "b": random((3, 8), 1), "c": random((4,), 2)}
    found = prox.best_approximations(params, {"a": 2, "b": 3})
    assert found["a"].rank == 2
    assert found["b"] is params["b"]
    assert found["c"] is params["c"]
