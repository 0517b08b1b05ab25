"""Seconds per server step: singular value thresholding of all layers of ResNet18, ways side by side.

    python benchmarks/svt.py --json results/benchmarks/svt.json

Layers are random matrices with the spectrum of a trained model: a few large singular values, most of them below the
threshold. Every way is compared with a full decomposition in double precision: the same ranks, and the largest
difference of any number.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import report
from fedslr import spectral
from fedslr.matrix import LowRank, from_matrix, matrix_shape
from fedslr.models.resnet import ResNet18
from fedslr.prox import singular_value_threshold

THRESHOLD = 1e-3
Way = Callable[[dict[str, torch.Tensor]], dict[str, LowRank]]


def layers(device: str) -> dict[str, torch.Tensor]:
    """Every matrix of the model: a third of its directions above the threshold, falling geometrically from 1."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, p in ResNet18((3, 32, 32), 10).named_parameters():
        if p.ndim < 2:
            continue
        m, n = matrix_shape(tuple(p.shape))
        r = min(m, n)
        u, v = (torch.linalg.qr(torch.randn(k, r, generator=generator, dtype=torch.float64))[0] for k in (m, n))
        kept = max(1, r // 3)
        s = torch.cat([torch.logspace(0, -2.7, kept), torch.linspace(0.9e-3, 1e-5, r - kept)]).double()
        out[name] = from_matrix((u * s) @ v.mT, tuple(p.shape)).float().to(device)
    return out


def one_by_one(given: dict[str, torch.Tensor]) -> dict[str, LowRank]:
    """A singular value decomposition of every layer."""
    return {k: singular_value_threshold(x, THRESHOLD) for k, x in given.items()}


def together(given: dict[str, torch.Tensor]) -> dict[str, LowRank]:
    """Gram matrices, several at a time."""
    return spectral.threshold_all(given, THRESHOLD)


def seconds(way: Way, given: dict[str, torch.Tensor], repeat: int) -> float:
    """The median of several runs after a first one."""
    took = []
    for _ in range(repeat + 1):
        begun = time.perf_counter()
        way(given)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return statistics.median(took[1:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeat", type=int, default=5)
    options.add_argument("--json", help="where to write the figures")
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = {k: singular_value_threshold(x.double(), THRESHOLD) for k, x in layers("cpu").items()}
    rows = []
    for name, way, where in (("svd", one_by_one, "cpu"), ("svd", one_by_one, device), ("gram", together, device)):
        if where == "cpu" and device == "cuda" and name != "svd":
            continue
        matrices = layers(where)
        found = way(matrices)
        rows.append(
            {
                "way": name,
                "device": where,
                "seconds": seconds(way, matrices, given.repeat),
                "ranks": "equal" if all(found[k].rank == x.rank for k, x in exact.items()) else "DIFFERENT",
                "difference": max(float((found[k].dense().cpu() - x.dense()).abs().max()) for k, x in exact.items()),
            }
        )
        report.show(rows[-1:])
    report.finish("svt", rows, given.json)


if __name__ == "__main__":
    main()
