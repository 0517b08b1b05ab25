"""Singular value thresholding of a whole model on a GPU.

The singular values of a matrix are the square roots of the eigenvalues of its Gram matrix. A GPU decomposes the Gram
matrix of the smaller side several times faster than it computes a singular value decomposition. Squaring halves the
number of correct digits of small singular values, so matrices in single precision are decomposed in double precision.

After some training, a large matrix has few singular values above the threshold, and their vectors are close to those
of the previous round. A few steps of subspace iteration from these vectors find them. A Cholesky decomposition of the
remainder then proves that no other singular value is above the threshold: the rank is as exact as that of a full
decomposition.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import acosh

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fedslr.core.matrix import LowRank, to_matrix


def threshold_all(
    layers: Mapping[str, Tensor], threshold: float, last: Mapping[str, Tensor | LowRank] | None = None
) -> dict[str, LowRank]:
    """Apply `prox.singular_value_threshold` to every layer.

    The iteration starts from `last`, the result of the previous round.
    """
    before = last or {}
    matrices = {name: to_matrix(x) for name, x in layers.items()}
    by_size = sorted(matrices, key=lambda name: -min(matrices[name].shape))
    device = next(iter(layers.values())).device
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def decompose(name: str) -> tuple[Tensor, Tensor, Tensor]:
        with _on_own_stream(here):
            tall, start = _tall(matrices[name]).double(), _previous_directions(matrices[name], before.get(name))
            found = None if start is None else _iterate(tall, start.double(), threshold)
            return _threshold_by_gram(tall, threshold) if found is None else found

    # One thread must load the linear algebra library before other threads use it.
    _load_library(device)
    # A decomposition often waits for the GPU; several decompositions at a time keep the GPU busy.
    found = dict(zip(by_size, _thread_pool().map(decompose, by_size), strict=True))
    ranks = torch.stack([found[name][2] for name in layers]).tolist()
    if min(ranks) < 0:
        raise LinAlgError("a layer has values that are not finite (NaN or infinity)")
    return {
        name: _factors(layers[name], matrices[name], *found[name][:2], rank)
        for name, rank in zip(layers, ranks, strict=True)
    }


def truncate(x: Tensor, rank: int) -> LowRank:
    """Return `prox.best_approximation` of a layer."""
    matrix = to_matrix(x)
    tall = _tall(matrix).double()
    vectors = torch.linalg.eigh(tall.mT @ tall).eigenvectors.flip(-1)
    return _factors(x, matrix, tall @ vectors, vectors, rank)


@functools.cache
def _load_library(device: torch.device) -> None:
    torch.linalg.eigh(torch.eye(2, device=device, dtype=torch.float64))


@functools.cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, "singular-values")


@contextmanager
def _on_own_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on a stream of this thread: after the work queued on the given stream, before its later work."""
    if stream is None:
        yield
        return
    if not hasattr(_thread_streams, "stream"):
        _thread_streams.stream = torch.cuda.Stream(stream.device, priority=-1)
    _thread_streams.stream.wait_stream(stream)
    with torch.cuda.stream(_thread_streams.stream):
        yield
    stream.wait_stream(_thread_streams.stream)


_thread_streams = threading.local()


def _threshold_by_gram(tall: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return U·max(σ − τ, 0), V and the number of singular values above τ, largest first.

    The number is −1 if a singular value is not finite.
    """
    values, vectors = torch.linalg.eigh(tall.mT @ tall)
    values, vectors = values.flip(-1).clamp_min(0).sqrt(), vectors.flip(-1)
    shrunk = torch.where(values > threshold, 1 - threshold / values, 0.0)
    rank = torch.where(torch.isfinite(values.sum()), (values > threshold).sum(), -1)
    return tall @ vectors * shrunk, vectors, rank


MIN_ITERATED_SIDE = 512
"""The smallest side of a matrix for which subspace iteration is faster than a decomposition."""
MIN_SIDE_PER_RANK = 8
"""The smallest ratio of the smaller side to the previous rank for which iteration is used."""
EXTRA_DIRECTIONS = 24
"""The number of random directions that are iterated together with those of the previous round."""
MAX_ITERATIONS = 12
RESIDUAL_TOLERANCE = 1e-7
"""The largest ‖G·v − λ·v‖ of an accepted eigenvector, in units of the threshold's square."""
MAX_GROWTH_RATIO = 1e7
"""The largest ratio of the growth of two directions in one iteration."""


def _previous_directions(matrix: Tensor, last: Tensor | LowRank | None) -> Tensor | None:
    """Return the right singular vectors of the previous round if the matrix is large and its rank was low."""
    small = min(matrix.shape)
    if not isinstance(last, LowRank) or small < MIN_ITERATED_SIDE or MIN_SIDE_PER_RANK * last.rank > small:
        return None
    return last.v if matrix.shape[0] >= matrix.shape[1] else last.u


def _iterate(tall: Tensor, start: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the result of `_threshold_by_gram`, found by iteration from `start`; None if completeness is not proved.

    The method is subspace iteration on the Gram matrix G, accelerated by Chebyshev polynomials. Eigenvectors that have
    converged are removed from the matrix, those with the largest eigenvalues first.
    """
    gram, square = tall.mT @ tall, threshold * threshold
    left, found, squares = gram, start[:, :0], start.new_zeros(0)
    basis = _orthonormal(torch.cat([start, _extra_directions(tall.shape[1], tall.device)], 1), found)
    for _ in range(MAX_ITERATIONS):
        if basis is None:
            return None
        image = left @ basis
        values, turn = torch.linalg.eigh(basis.mT @ image)
        values, basis, image = values.flip(0), basis @ turn.flip(1), image @ turn.flip(1)
        away = (image - basis * values).norm(dim=0)
        sizes, aways = torch.stack([values, away]).tolist()
        wanted = sum(size > square for size in sizes)
        if wanted + EXTRA_DIRECTIONS // 4 > len(sizes) or not sizes[-1] > 0:
            return None
        near = RESIDUAL_TOLERANCE * square + 1e-14 * sizes[0]
        done = next((i for i in range(wanted) if not aways[i] <= near), wanted)
        found, squares = torch.cat([found, basis[:, :done]], 1), torch.cat([squares, values[:done]])
        if done == wanted:
            return _proved(tall, gram, found, squares, threshold)
        left = left - (basis[:, :done] * values[:done]) @ basis[:, :done].mT
        basis = _orthonormal(_chebyshev(left, basis[:, done:], sizes[done], sizes[-1]), found)
    return None


def _chebyshev(matrix: Tensor, basis: Tensor, top: float, edge: float) -> Tensor:
    """Return a Chebyshev polynomial of a matrix times a basis: directions with eigenvalues above `edge` grow.

    The degree is limited so that the direction of the largest eigenvalue outgrows others by `MAX_GROWTH_RATIO` at most.
    """
    degree = max(1, min(12, int(acosh(MAX_GROWTH_RATIO) / acosh(max(2 * top / edge - 1, 1.01)))))
    last, this = basis, matrix @ basis * (2 / edge) - basis
    for _ in range(degree - 1):
        last, this = this, matrix @ this * (4 / edge) - 2 * this - last
    grown: Tensor = this / this.norm(dim=0)
    return grown


def _proved(
    tall: Tensor, gram: Tensor, found: Tensor, squares: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the result if no other singular value is above the threshold; None if this is not proved.

    The proof is a Cholesky decomposition of τ²I − (I − VVᵀ)G(I − VVᵀ): it exists if this matrix is positive definite.
    """
    image = gram @ found
    side = found @ image.mT
    rest = side + side.mT - gram - found @ (found.mT @ image) @ found.mT
    rest.diagonal().add_(threshold * threshold)
    if int(torch.linalg.cholesky_ex(rest).info):
        return None
    shrunk = 1 - threshold / squares.sqrt()
    return tall @ found * shrunk, found, torch.tensor(len(squares), device=tall.device)


def _orthonormal(columns: Tensor, to: Tensor) -> Tensor | None:
    """Return an orthonormal basis of the span of some columns, orthogonal to the columns of `to`.

    Return None if the columns are numerically dependent. The second pass removes the rounding error of the first one.
    """
    for _ in range(2):
        columns = columns - to @ (to.mT @ columns)
        lower = torch.linalg.cholesky_ex(columns.mT @ columns).L
        columns = torch.linalg.solve_triangular(lower.mT, columns, upper=True, left=False)
    return columns if bool(torch.isfinite(columns.sum())) else None


@functools.cache
def _extra_directions(size: int, device: torch.device) -> Tensor:
    """Return random directions that depend on the size only."""
    generator = torch.Generator().manual_seed(size)
    drawn: Tensor = torch.randn(size, EXTRA_DIRECTIONS, generator=generator, dtype=torch.float64) / size**0.5
    return drawn.to(device)


def _tall(m: Tensor) -> Tensor:
    return m if m.shape[0] >= m.shape[1] else m.mT


def _factors(x: Tensor, matrix: Tensor, left: Tensor, right: Tensor, rank: int) -> LowRank:
    """Return the first `rank` directions as factors in the layer's precision, transposed if the matrix was wide."""
    u, v = (side[:, :rank].to(x.dtype).contiguous() for side in (left, right))
    if matrix.shape[0] < matrix.shape[1]:
        u, v = v, u
    return LowRank(u, v, tuple(x.shape))
