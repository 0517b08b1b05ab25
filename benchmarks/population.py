"""Measure seconds per round with 100, 1,000, 10,000 and 100,000 clients, of which ten train in a round.

    python benchmarks/population.py --trained --json results/benchmarks/population.json

The job: FedSLR, the CNN on digits, 20 samples per client (clients share samples), client states on disk, a checkpoint
every ten rounds. Every population runs in a process of its own, so that its memory can be measured. The processes take
turns, so that a busy machine slows all of them alike. The first ten rounds are not timed: the checkpoint after them
hashes all data once. Only some clients train in so few rounds. With --trained, every client has a state on disk and in
the checkpoint before the first timed round (many names of a few files, so reads come from the system's cache).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fedslr
import report
from fedslr.core import tree
from fedslr.core.states import plain
from fedslr.data.client_data import ClientData
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings
from fedslr.storage.run_folder import RunFolder
from fedslr.storage.tree_files import Entry, write_tree

SAMPLES, TESTED, WARM, COHORT = 20, 5, 10, 10
LINKS = 30_000
"""The number of hard links that common file systems allow per file."""


class Population(Sequence[ClientData]):
    """A sequence of clients, each with its own window of the same samples."""

    def __init__(self, clients: int) -> None:
        (self.all,) = fedslr.load("digits", clients=1, split="iid", seed=0).clients
        self.clients = clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < self.clients:
            raise IndexError(client)
        i, j = 7 * client % (len(self.all.y) - SAMPLES), 3 * client % (len(self.all.y_test) - TESTED)
        train, test = slice(i, i + SAMPLES), slice(j, j + TESTED)
        return ClientData(self.all.x[train], self.all.y[train], self.all.x_test[test], self.all.y_test[test])


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def pretend_all_trained(simulation: Simulation, folder: Path) -> None:
    """Give every client a state on disk, as hard links to as few files as the file system allows."""
    store, fresh = simulation.store, simulation.state.roster.new_member
    client, ledger = (tree.map(lambda x: 1e-3 * torch.randn_like(x), plain(part)) for part in fresh[:2])
    state = {"client": client, "ledger": ledger, "address": {}}
    for number in range(simulation.num_clients):
        name = f"client-{number:06d}-000000.safetensors"
        if number % LINKS == 0:
            first = write_tree(folder / name, state)
        else:
            os.link(folder / first.file, folder / name)
        store.entries[number] = store.fresh[number] = Entry(name, first.sha256)


def work(clients: int, rounds: int, trained: bool) -> None:
    """Run one population: one round per input line, answered by its seconds; at the end report memory and files."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="fedslr-population-"))
    try:
        begun = time.perf_counter()
        settings = Settings(
            rounds=rounds,
            clients_per_round=COHORT,
            device="cpu",
            store="disk",
            evaluate_every=10**9,
            evaluate_clients=100,
            checkpoint_every=10,
        )
        federation = fedslr.Federation(Population(clients), 10, "digits")
        simulation = Simulation(fedslr.FedSLR(), federation, "cnn", settings, RunFolder(folder))
        simulation.begin()
        if trained:
            pretend_all_trained(simulation, folder / "checkpoint" / "clients")
        print(time.perf_counter() - begun, flush=True)
        done = simulation.rounds()
        for _ in sys.stdin:
            begun = time.perf_counter()
            next(done)
            print(time.perf_counter() - begun, flush=True)
        print(resident_megabytes(), sum(len(files) for _, _, files in os.walk(folder)), flush=True)
    finally:
        shutil.rmtree(folder)


def start(clients: int, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--work", str(clients), "--rounds", str(args.rounds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command + ["--trained"] * args.trained, stdin=pipe, stdout=pipe, text=True)


def ask(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdout is not None
    answer = process.stdout.readline().split()
    if not answer:
        raise SystemExit("a population stopped")
    return [float(word) for word in answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--trained", action="store_true", help="give every client a state on disk before the first round"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < WARM + 2:
        parser.error(f"--rounds must be at least {WARM + 2}: the first {WARM} and the last are not timed")
    if min(args.clients) < COHORT:
        parser.error(f"--clients must be at least {COHORT}: that many train in a round")
    if args.work:
        work(args.work, args.rounds, args.trained)
        return

    processes = {clients: start(clients, args) for clients in args.clients}
    starts = {clients: ask(process)[0] for clients, process in processes.items()}
    seconds: dict[int, list[float]] = {clients: [] for clients in processes}
    for _, (clients, process) in itertools.product(range(args.rounds), processes.items()):
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
        seconds[clients] += ask(process)
    rows: list[dict[str, Any]] = []
    for clients, process in processes.items():
        assert process.stdin is not None
        process.stdin.close()
        megabytes, files = ask(process)
        process.wait()
        # The last round is not timed because it evaluates.
        counted = seconds[clients][WARM:-1]
        row = {
            "clients": clients,
            "s/round": statistics.median(counted),
            "mean s/round": statistics.fmean(counted),
            "resident MB": megabytes,
            "files": int(files),
            "start s": starts[clients],
        }
        first = rows[0] if rows else row
        row["s ratio"], row["MB ratio"] = (row[k] / first[k] for k in ("s/round", "resident MB"))
        rows.append(row)
    report.finish("population-trained" if args.trained else "population", rows, args.json)


if __name__ == "__main__":
    report.call(main)
