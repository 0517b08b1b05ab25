"""Singular value thresholding of a whole model on a GPU.

A matrix's singular values are the roots of the eigenvalues of its Gram matrix, which has the matrix's smaller side and
which a GPU decomposes several times faster than it computes a singular value decomposition. Squaring halves the digits
of small singular values, so all of it is done in double precision for matrices in single precision. Nothing is read
back but the ranks of all layers, once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fedslr.matrix import LowRank, to_matrix


def threshold_all(layers: Mapping[str, Tensor], threshold: float) -> dict[str, LowRank]:
    """prox of τ‖π(·)‖_* of every layer, as `prox.singular_value_threshold` has it."""
    matrices = {name: to_matrix(x) for name, x in layers.items()}
    by_size = sorted(matrices, key=lambda name: -min(matrices[name].shape))
    device = next(iter(layers.values())).device
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def decompose(name: str) -> tuple[Tensor, Tensor, Tensor]:
        with _beside(here):
            return _shrink(_tall(matrices[name]).double(), threshold)

    # The library behind it must be loaded by one thread, before others use it.
    _load(device)
    # A decomposition waits for the GPU again and again; several at a time keep it busy.
    found = dict(zip(by_size, _pool().map(decompose, by_size), strict=True))
    ranks = torch.stack([found[name][2] for name in layers]).tolist()
    if min(ranks) < 0:
        raise LinAlgError("a layer has numbers that are not finite")
    return {
        name: _factors(layers[name], matrices[name], *found[name][:2], rank)
        for name, rank in zip(layers, ranks, strict=True)
    }


@functools.cache
def _load(device: torch.device) -> None:
    torch.linalg.eigh(torch.eye(2, device=device, dtype=torch.float64))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, "singular-values")


@contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On a stream of this thread's own, after what the given stream has done so far and before what it will do."""
    if stream is None:
        yield
        return
    if not hasattr(_own, "stream"):
        _own.stream = torch.cuda.Stream(stream.device, priority=-1)
    _own.stream.wait_stream(stream)
    with torch.cuda.stream(_own.stream):
        yield
    stream.wait_stream(_own.stream)


_own = threading.local()


def _shrink(tall: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """U·max(σ − τ, 0), V and the number of singular values above τ, those first; −1 if they are not numbers."""
    values, vectors = torch.linalg.eigh(tall.mT @ tall)
    values, vectors = values.flip(-1).clamp_min(0).sqrt(), vectors.flip(-1)
    shrunk = torch.where(values > threshold, 1 - threshold / values, 0.0)
    rank = torch.where(torch.isfinite(values.sum()), (values > threshold).sum(), -1)
    return tall @ vectors * shrunk, vectors, rank


def _tall(m: Tensor) -> Tensor:
    return m if m.shape[0] >= m.shape[1] else m.mT


def _factors(x: Tensor, matrix: Tensor, left: Tensor, right: Tensor, rank: int) -> LowRank:
    """The first `rank` directions, in the layer's own precision and the right way up."""
    u, v = (side[:, :rank].to(x.dtype).contiguous() for side in (left, right))
    if matrix.shape[0] < matrix.shape[1]:
        u, v = v, u
    return LowRank(u, v, tuple(x.shape))
