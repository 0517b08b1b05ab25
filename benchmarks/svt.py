"""Measure seconds per server step: singular value thresholding of all layers of ResNet18, several methods side by side.

    python benchmarks/svt.py --json results/benchmarks/svt.json

Layers are random matrices with the ranks of a model that FedSLR trained on CIFAR-10: their singular values decay
geometrically to just above the threshold, and the others are below it. "Followed" starts from the result for slightly
different matrices, as in a round. Every method is compared with a full decomposition in float64: equal ranks, and the
largest difference of any number.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import report
from fedslr.core import spectral
from fedslr.core.matrix import LowRank, from_matrix, matrix_shape
from fedslr.core.prox import singular_value_threshold
from fedslr.models.networks import ResNet18

THRESHOLD = 1e-3
Way = Callable[[dict[str, torch.Tensor]], dict[str, LowRank]]


RANKS = {
    "conv.weight": 9, "blocks.0.conv1.weight": 47, "blocks.0.conv2.weight": 66, "blocks.1.conv1.weight": 59,
    "blocks.1.conv2.weight": 58, "blocks.2.conv1.weight": 93, "blocks.2.conv2.weight": 112,
    "blocks.2.shortcut.0.weight": 50, "blocks.3.conv1.weight": 108, "blocks.3.conv2.weight": 109,
    "blocks.4.conv1.weight": 254, "blocks.4.conv2.weight": 396, "blocks.4.shortcut.0.weight": 88,
    "blocks.5.conv1.weight": 378, "blocks.5.conv2.weight": 318, "blocks.6.conv1.weight": 369,
    "blocks.6.conv2.weight": 66, "blocks.6.shortcut.0.weight": 17, "blocks.7.conv1.weight": 8,
    "blocks.7.conv2.weight": 5, "head.weight": 9,
}  # fmt: skip
"""The ranks after 1000 rounds: `rank` in results/cifar10-dirichlet0.1/fedslr-authors/summary.json."""
DRIFT = 0.003
"""Half the spectral norm of the change per round, in thresholds: small enough to keep the ranks."""


def layers(device: str, drift: float = 0.0) -> dict[str, torch.Tensor]:
    """Return every matrix of the model, or a slightly different one."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, p in ResNet18((3, 32, 32), 10).named_parameters():
        if p.ndim < 2:
            continue
        m, n = matrix_shape(tuple(p.shape))
        r, kept = min(m, n), RANKS[name]
        u, v = (torch.linalg.qr(torch.randn(k, r, generator=generator, dtype=torch.float64))[0] for k in (m, n))
        s = torch.cat([torch.logspace(0.5, -2.99, kept), torch.linspace(0.98e-3, 1e-5, r - kept)]).double()
        moved = torch.randn(m, n, generator=generator, dtype=torch.float64) * THRESHOLD / max(m, n) ** 0.5
        out[name] = from_matrix((u * s) @ v.mT + drift * moved, tuple(p.shape)).float().to(device)
    return out


def one_by_one(given: dict[str, torch.Tensor]) -> dict[str, LowRank]:
    """Threshold every layer by a singular value decomposition."""
    return {k: singular_value_threshold(x, THRESHOLD) for k, x in given.items()}


def together(given: dict[str, torch.Tensor]) -> dict[str, LowRank]:
    """Threshold by eigenvalues of Gram matrices, several layers at a time."""
    return spectral.threshold_all(given, THRESHOLD)


def following(device: str) -> Way:
    """Do the same, and follow the few large singular values of large matrices from the round before."""
    last = spectral.threshold_all(layers(device, DRIFT), THRESHOLD)
    return lambda given: spectral.threshold_all(given, THRESHOLD, last)


def seconds(way: Way, given: dict[str, torch.Tensor], repeat: int) -> float:
    """Return the median time of several runs after a first one."""
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
    options.add_argument("--json", help="also write the figures to this file")
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    exact = {k: singular_value_threshold(x.double(), THRESHOLD) for k, x in layers("cpu").items()}
    rows = []
    ways: list[tuple[str, Way, str]] = [("svd", one_by_one, "cpu"), ("svd", one_by_one, device)]
    ways += [("gram", together, device), ("followed", following(device), device)]
    for name, way, where in ways:
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
    report.call(main)
