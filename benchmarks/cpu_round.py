"""Measure seconds per round of FedAvg on a CPU: fedslr's engines beside a bare PyTorch loop.

    python benchmarks/cpu_round.py
    python benchmarks/cpu_round.py --pfl

The job: 100 clients of digits, 10 per round, batch size 10, 2 epochs. All programs do the same steps on the same
data and take turns of a few rounds, so that a busy machine slows all of them alike. The engines and the bare loop
run in this process. `--pfl` adds Apple's pfl, which runs in a process of its own from a temporary folder.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedslr
import report
from fedslr import models
from fedslr.core import seeds
from fedslr.engine import selection
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings

LR, DECAY = 0.1, 1e-3
BARE = "bare PyTorch loop"
ENGINES: dict[str, dict[str, Any]] = {
    "fedslr, eager": {"engine": "eager"},
    "fedslr, batched": {"engine": "batched"},
}
TURN = 10
"""Rounds of a turn."""
WARM = TURN
"""The first rounds are not timed. The models are compared after them: later, rounding errors make the runs diverge,
because another pixel becomes the largest of a pooling window."""


def load() -> fedslr.Federation:
    return fedslr.load("digits", clients=100, split="dirichlet", alpha=0.1, seed=0)


def bare_rounds(federation: fedslr.Federation, settings: Settings) -> Iterator[nn.Module]:
    """FedAvg as written in a notebook: torch.optim, client after client, the weighted mean of the models."""
    model = models.build("cnn", federation.input_shape, federation.num_classes, settings.seed)
    worker = copy.deepcopy(model)
    sizes = [len(c.y) for c in federation.clients]
    for t in range(settings.rounds):
        lr = LR * settings.lr_decay**t
        total: dict[str, torch.Tensor] = {}
        weights = 0
        for c in selection.draw(selection.uniform, 10, sizes, settings.seed, t):
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


def pfl_rounds(folder: str, rounds: int) -> Iterator[None]:
    """The same job in pfl. Its first round starts at once."""
    job = [sys.executable, str(Path(__file__).with_name("pfl_job.py")), folder]
    command = [*job, str(rounds), str(torch.get_num_threads())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() != "done":
                continue
            yield
            child.stdin.write("\n")
            child.stdin.flush()
    raise SystemExit("pfl stopped before its last round")


def install_pfl(folder: str) -> None:
    """Install pfl 0.6.0 into a folder that comes after the project's packages on the path."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        folder,
    ]
    subprocess.run([*pip, "pfl==0.6.0"], check=True)


def in_turns(jobs: dict[str, Iterator[Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every job's rounds; the order of the jobs is reversed in every turn."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for begin in range(0, rounds, TURN):
        for name in list(jobs)[:: -1 if begin // TURN % 2 else 1]:
            for _ in range(begin, min(begin + TURN, rounds)):
                begun = time.perf_counter()
                next(jobs[name])
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pfl", action="store_true", help="install Apple's pfl into a temporary folder and run it too")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if args.rounds < WARM + 2:
        parser.error(
            f"--rounds: got {args.rounds}, expected {WARM + 2} or more; the first {WARM} and the last do not count"
        )
    torch.set_num_threads(args.threads)

    # The last round is not timed because it evaluates.
    shared = {"rounds": args.rounds, "clients_per_round": 10, "batch_size": 10, "epochs": 2, "device": "cpu"}
    shared |= {"lr": LR, "weight_decay": DECAY, "evaluate_every": 10**9}
    federation = load()
    simulations = {
        name: Simulation(fedslr.FedAvg(), federation, "cnn", Settings(**shared, **options))
        for name, options in ENGINES.items()
    }
    models_of_bare: list[nn.Module] = []
    jobs: dict[str, Iterator[Any]] = {BARE: kept(bare_rounds(federation, Settings(**shared)), models_of_bare)}
    jobs |= {name: simulation.rounds() for name, simulation in simulations.items()}
    with tempfile.TemporaryDirectory() as folder:
        if args.pfl:
            install_pfl(folder)
            jobs["pfl 0.6.0"] = pfl_rounds(folder, args.rounds)
        first = in_turns(jobs, WARM)
        gaps = {name: gap(models_of_bare[-1], simulation) for name, simulation in simulations.items()}
        seconds = in_turns(jobs, args.rounds - 1 - WARM)
        for job in jobs.values():
            job.close()  # type: ignore[attr-defined]

    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, median in medians.items():
        row = {
            "": name,
            "s/round": median,
            "ratio": median / medians[BARE],
            "first rounds s": sum(first[name]),
            "difference": gaps.get(name, "–"),
        }
        rows.append(row)
    report.finish("cpu_round", rows, args.json)


def kept(rounds: Iterator[nn.Module], last: list[nn.Module]) -> Iterator[None]:
    """Run the rounds and keep the model of the last one."""
    for model in rounds:
        last[:] = [model]
        yield


def gap(model: nn.Module, simulation: Simulation) -> float:
    """Return the largest difference between two models that should be equal."""
    found = simulation.state.server_state.server.w
    return max(float((p - found[n]).abs().max()) for n, p in model.state_dict().items())


if __name__ == "__main__":
    report.call(main)
