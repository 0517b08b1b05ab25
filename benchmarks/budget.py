"""Compare fedslr-budget with FedSLR: size and accuracy of personal models, on up to four data sets.

    python benchmarks/budget.py
    python benchmarks/budget.py --har har.npz --audiomnist audiomnist.npz --heart heart --seeds 0 1

Digits are part of scikit-learn. The other data sets are published ones:

- UCI HAR, an .npz file with x (10299, 9, 128), y and subject; one client per subject.
- AudioMNIST, an .npz file with x (30000, 1, 32, 32) of 8 bits, y and speaker; one client per speaker, a quarter of it.
- UCI Heart Disease, a folder of CSV files with columns X1 to X14; one client per file.

A random fifth of every client's samples is test data. Neighbouring windows of HAR overlap, so its accuracies are high.

"tuned" is the run with the highest personal accuracy among FedSLR's PENALTIES. Choosing by test accuracy favours it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import fedslr

ETA_G = 5
PENALTIES = [(1e-3, 3e-3), (5e-3, 1e-3), (5e-3, 3e-3), (2e-2, 3e-3)]
"""Rank penalties and l1 penalties that FedSLR is tuned over; its defaults are another row."""

Arrays = dict[str, Any]


class Setup(NamedTuple):
    """A data set with the settings of its runs."""

    load: Callable[[int], fedslr.Federation]
    """A function of the seed."""
    model: str
    settings: dict[str, Any]


class Figures(NamedTuple):
    """The figures of one run, in per cent; sizes as a share of the dense model."""

    size: float
    shared: float
    personal_accuracy: float
    global_accuracy: float


def by_client(x: np.ndarray, y: np.ndarray, owner: np.ndarray, seed: int) -> fedslr.Federation:
    """Return one client per owner, with a random fifth of its samples as test data."""
    clients, generator = [], np.random.default_rng(seed)
    for one in np.unique(owner):
        mine = generator.permutation(np.flatnonzero(owner == one))
        test, train = np.split(mine, [len(mine) // 5])
        clients.append({"x": x[train], "y": y[train], "x_test": x[test], "y_test": y[test]})
    return fedslr.Federation.from_arrays(clients)


def digits(seed: int) -> fedslr.Federation:
    return fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=seed)


def har(path: Path, seed: int) -> fedslr.Federation:
    with np.load(path) as data:
        return by_client(data["x"].astype(np.float32), data["y"].astype(np.int64), data["subject"], seed)


def audiomnist(path: Path, seed: int) -> fedslr.Federation:
    with np.load(path) as data:
        part = slice(None, None, 4)
        x = data["x"][part].astype(np.float32) / 255
        return by_client(x, data["y"][part].astype(np.int64), data["speaker"][part], seed)


def heart(folder: Path, seed: int) -> fedslr.Federation:
    """Return one client per hospital; missing values are the mean of all known ones."""
    files = sorted(folder.glob("*.csv"))
    tables = [
        np.genfromtxt(file, delimiter=",", skip_header=1, missing_values="-9", filling_values=-9) for file in files
    ]
    table, owner = np.concatenate(tables), np.repeat(np.arange(len(files)), [len(t) for t in tables])
    x, y = np.where(table[:, :-1] == -9, np.nan, table[:, :-1]), (table[:, -1] > 0).astype(np.int64)
    x = (x - np.nanmean(x, 0)) / np.nanstd(x, 0)
    return by_client(np.nan_to_num(x).astype(np.float32), y, owner, seed)


def setups(args: argparse.Namespace) -> Iterator[tuple[str, Setup]]:
    rounds = {"rounds": args.rounds}
    yield "digits", Setup(digits, "cnn", {"clients_per_round": 5, **rounds})
    yield "digits, MLP", Setup(digits, "mlp", {"clients_per_round": 5, **rounds})
    if args.har:
        yield "HAR", Setup(partial(har, args.har), "mlp", {"clients_per_round": 6, "lr": 0.05, **rounds})
    if args.audiomnist:
        sound = {"clients_per_round": 6, "lr": 0.05, **rounds}
        yield "AudioMNIST", Setup(partial(audiomnist, args.audiomnist), "cnn", sound)
    if args.heart:
        yield "heart", Setup(partial(heart, args.heart), "mlp", {"clients_per_round": 4, "lr": 0.05, **rounds})


def measure(method: fedslr.Algorithm[Any, Any, Any], setup: Setup, seeds: list[int], warnings: set[str]) -> Figures:
    """Return the means over seeds."""
    found = []
    for seed in seeds:
        data, settings = setup.load(seed), setup.settings
        run = fedslr.run(method, data, setup.model, seed=seed, warn=warnings.add, **settings)
        sizes, accuracy = run.summary["parameters"], run.summary["accuracy"]
        parts = (sizes["personal"] / sizes["dense"], sizes["global"] / sizes["dense"])
        found.append([100 * value for value in (*parts, accuracy["personal"], accuracy["global"])])
    return Figures(*(fmean(column) for column in zip(*found, strict=True)))


def rows(setup: Setup, seeds: list[int], target: float, tune: bool) -> Iterator[tuple[str, Figures, set[str]]]:
    said: set[str] = set()
    yield "`fedslr-budget`", measure(fedslr.FedSLRBudget(eta_g=ETA_G, target_size=target), setup, seeds, said), said
    said = set()
    yield "`fedslr`, defaults", measure(fedslr.FedSLR(), setup, seeds, said), said
    if tune:
        methods = [fedslr.FedSLR(eta_g=ETA_G, rank_penalty=rank, l1_penalty=l1) for rank, l1 in PENALTIES]
        tried = [(measure(method, setup, seeds, set()), method) for method in methods]
        best, method = max(tried, key=lambda one: one[0].personal_accuracy)
        yield f"`fedslr`, tuned: {method.rank_penalty:g}, {method.l1_penalty:g}", best, set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("har", "audiomnist", "heart"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", type=float, default=0.3, help="size of fedslr-budget's models")
    parser.add_argument("--only", help="one data set of the table")
    parser.add_argument("--no-tuning", action="store_true")
    args = parser.parse_args()
    print("| data | method | size % | global part % | personal % | global % |\n|---|---|---:|---:|---:|---:|")
    for name, setup in setups(args):
        if args.only in (None, name):
            for method, figures, said in rows(setup, args.seeds, args.target, not args.no_tuning):
                print(f"| {name} | {method} |", " | ".join(f"{value:.1f}" for value in figures), "|", flush=True)
                for text in sorted(said):
                    print(f"  warned: {text}")


if __name__ == "__main__":
    main()
