"""Measure seconds to save the states of some clients and to verify their files, for several numbers of threads.

    python benchmarks/saving.py --clients 20

A state is that of a FedSLR client with ResNet18: a personal part of which one entry in twenty is not zero, and a dense
dual. The numbers of threads take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import report
from fedslr.models.networks import ResNet18
from fedslr.storage import tree_files
from fedslr.storage.client_store import ClientStore

DENSITY = 0.05


def state(seed: int) -> dict[str, Any]:
    """Return the state of one client."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in ResNet18((3, 32, 32), 10).named_parameters()}
    noise = [{k: torch.randn(shape, generator=generator) for k, shape in shapes.items()} for _ in range(2)]
    kept = {k: torch.rand(shape, generator=generator) < DENSITY for k, shape in shapes.items()}
    p = {k: torch.where(kept[k], x, 0.0) for k, x in noise[0].items()}
    return {"client": {"p": p}, "ledger": noise[1], "address": {}}


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(states: list[dict[str, Any]], device: str) -> dict[str, float]:
    """Save all states, and verify them as a resumed run does."""
    with tempfile.TemporaryDirectory() as folder:
        kept = ClientStore(Path(folder), device)
        for client, one in enumerate(states):
            kept.put(client, one, 1)
        took = {"save": seconds(kept.save)}
        took["verify"] = seconds(lambda: tree_files.verify(Path(folder), kept.entries.values()))
        took["MB"] = sum(p.stat().st_size for p in Path(folder).iterdir()) / 1e6
        kept.close()
        return took


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--clients", type=int, default=20)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--json", help="also write the figures to this file")
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = [state(client) for client in range(given.clients)]
    counts = sorted({1, tree_files.threads()})
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for turn in range(given.repeat + 1):
        for count in counts:
            tree_files.THREADS = count
            took = measure(states, device)
            # The first turn is not timed: it warms up disk and memory.
            if turn:
                found[count].append(took)
    rows: list[dict[str, Any]] = [
        {"threads": count, **{k: statistics.median(t[k] for t in runs) for k in runs[0]}}
        for count, runs in found.items()
    ]
    report.finish("saving", rows, given.json)


if __name__ == "__main__":
    report.call(main)
