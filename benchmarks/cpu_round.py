"""Seconds per round of FedAvg: this package against a bare PyTorch loop doing the same SGD steps on the same data.

    python benchmarks/cpu_round.py

100 clients of digits, 10 per round, batch 10, 2 epochs. Both run in this process, in turns, round by round.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedslr
from fedslr import models, seeds
from fedslr.config import Settings
from fedslr.engine import cohort
from fedslr.engine.rounds import Simulation

LR, DECAY = 0.1, 1e-3


def bare_rounds(federation: fedslr.Federation, settings: Settings) -> Iterator[nn.Module]:
    """What one writes in a notebook: torch.optim, one client after another, the weighted mean of the models."""
    model = models.build("cnn", federation, settings.seed)
    worker = copy.deepcopy(model)
    sizes = [len(c.y) for c in federation.clients]
    for t in range(settings.rounds):
        lr = LR * settings.lr_decay**t
        total: dict[str, torch.Tensor] = {}
        weights = 0
        for c in cohort.draw(cohort.uniform, 10, sizes, settings.seed, t):
            x, y = federation.inputs(federation.clients[c].x), federation.clients[c].y
            worker.load_state_dict(model.state_dict())
            optimizer = torch.optim.SGD(worker.parameters(), lr=lr, weight_decay=DECAY)
            shuffles = seeds.generator(seeds.SHUFFLE, settings.seed, t, c, 0)
            for _ in range(settings.epochs):
                shuffle = torch.from_numpy(shuffles.permutation(len(y)))
                for part in shuffle.split(settings.batch_size):
                    optimizer.zero_grad()
                    cross_entropy(worker(x[part]), y[part]).backward()
                    optimizer.step()
            for name, p in worker.state_dict().items():
                total[name] = total.get(name, 0) + p * len(y)
            weights += len(y)
        model.load_state_dict({name: p / weights for name, p in total.items()})
        yield model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    settings = Settings(
        rounds=args.rounds,
        clients_per_round=10,
        batch_size=10,
        epochs=2,
        lr=LR,
        weight_decay=DECAY,
        evaluate_every=10**9,
    )
    federation = fedslr.load("digits", clients=100, split="dirichlet", alpha=0.1, seed=0)
    simulation = Simulation(fedslr.FedAvg(), federation, "cnn", settings)
    ours, theirs = simulation.rounds(), bare_rounds(federation, settings)
    seconds: dict[str, list[float]] = {"bare PyTorch loop": [], "fedslr, eager": []}
    # The last round evaluates, so it is left out.
    for t in range(args.rounds - 1):
        for name, rounds in sorted(zip(seconds, (theirs, ours), strict=True), reverse=bool(t % 2)):
            begun = time.perf_counter()
            model = next(rounds)
            seconds[name].append(time.perf_counter() - begun)
            if isinstance(model, nn.Module):
                reference = model
    gap = max(float((p - simulation.server.w[n]).abs().max()) for n, p in reference.state_dict().items())

    medians = {name: statistics.median(values[5:]) for name, values in seconds.items()}
    base = medians["bare PyTorch loop"]
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    print(f"{'':<20} {'s/round':>9} {'ratio':>7}")
    for name, value in medians.items():
        print(f"{name:<20} {value:>9.4f} {value / base:>7.2f}")
    print(f"largest difference of the two models after {args.rounds - 1} rounds: {gap:.1e}")
    if args.json:
        figures = {"seconds_per_round": medians, "threads": args.threads, "gap": gap}
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
