"""Measure seconds per round of the engines on a GPU: the paper's CIFAR-10 job (ResNet18, 100 clients, 10 per round).

    python benchmarks/gpu_round.py --rounds 50 --json results/benchmarks/gpu_round.json

Images are random unless --root names a folder with CIFAR-10; time does not depend on them. The first rounds of an
engine compile: they are not part of its figure and are printed beside it. The CUDA engine computes the server step
of FedSLR and Ditto while clients train their personal parts, so "aggregate" is only the time that a round waits for
it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

import fedslr
import report
from fedslr.algorithms import ALGORITHMS
from fedslr.data.cifar import CIFAR10
from fedslr.data.client_data import ClientData
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings
from fedslr.storage.record import PHASES


def random_images(clients: int = 100) -> Federation:
    """Return random data of CIFAR-10's shape and size."""
    rng = np.random.default_rng(0)

    def part(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = rng.integers(0, 256, (samples, 3, 32, 32), np.uint8)
        return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 10, samples))

    held = [ClientData(*part(500), *part(98)) for _ in range(clients)]
    return Federation(held, 10, "random", None, 4, CIFAR10.normalization)


def measure(federation: Federation, method: str, engine: str, precision: str, rounds: int, warm: int) -> dict[str, Any]:
    """Return mean seconds per round by phase, after `warm` rounds."""
    settings = Settings(
        rounds=warm + rounds, device="cuda", engine=engine, precision=precision, evaluate_every=min(25, rounds)
    )
    begun = time.perf_counter()
    simulation = Simulation(ALGORITHMS[method](), federation, "resnet18", settings)
    records = []
    for record in simulation.rounds():
        records.append(record)
        if len(records) == warm:
            first = time.perf_counter() - begun
            torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
    wall = time.perf_counter() - begun
    kept = records[warm:]
    by = {phase: sum(r.seconds_by[phase] for r in kept) / len(kept) for phase in PHASES}
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {
        "method": method, "engine": engine, "precision": precision, "rounds": rounds,
        "seconds": wall / len(kept), **by, "first_seconds": first, "peak_gb": peak,
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--eager-rounds", type=int, default=2, help="rounds of the eager engine; 0 omits it")
    options.add_argument("--methods", nargs="+", default=["fedslr"])
    options.add_argument("--precisions", nargs="+", default=["bf16"])
    options.add_argument("--root", help="folder with CIFAR-10")
    options.add_argument("--json", help="also write the figures to this file")
    given = options.parse_args()
    report.require_gpu()
    federation = random_images()
    if given.root:
        federation = fedslr.load("cifar10", root=given.root, clients=100, split="dirichlet", alpha=0.1, reuse=True)
    rows = []
    for method in given.methods:
        for precision in given.precisions:
            rows.append(measure(federation, method, "cuda", precision, given.rounds, 2))
            report.show(rows[-1:])
        if given.eager_rounds:
            rows.append(measure(federation, method, "eager", "float32", given.eager_rounds, 1))
            report.show(rows[-1:])
    report.finish("gpu_round", rows, given.json)


if __name__ == "__main__":
    report.call(main)
