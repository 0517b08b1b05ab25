"""Print the figures of results/cifar10-dirichlet0.1/notes.md and results/precision/README.md from the run folders.

python benchmarks/cifar10_findings.py                # from the records alone
python benchmarks/cifar10_findings.py --root data    # also what needs CIFAR-10: labels per split and cohort
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fedslr
import report

RUNS = Path("results/cifar10-dirichlet0.1")
LATE = 750
"""Differences between runs are averaged over the evaluations from this round on."""

BREAK = 0.2
"""A personal model counts as broken if its accuracy is this far below the client's median of nine evaluations."""


def records(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUNS / run / "metrics.jsonl").read_text().splitlines()]


def accuracies(run: str, model: str) -> dict[int, float]:
    """Return the mean accuracy over clients in %, by round."""
    name = f"accuracy_{model}"
    return {r["round"]: 100 * r[name] for r in records(run) if r.get(name) is not None}


def differences() -> Iterator[dict[str, Any]]:
    """Yield how far two runs are apart that differ in one thing, from round 750 on."""
    models = [("ditto", "global"), ("ditto", "personal"), ("feddyn", "global")]
    pairs = [(f"{m}-authors", f"{m}-authors-cohorts", "cohorts", k) for m, k in models]
    pairs += [(f"{m}-authors", f"{m}-authors-tf32", "precision", k) for m, k in models]
    pairs += [(m, f"{m}-authors", "split", k) for m, k in models]
    for first, second, differ_in, model in [*pairs, ("fedavg", "ditto", "method, same global model", "global")]:
        a, b = accuracies(first, model), accuracies(second, model)
        by_round = [b[t] - a[t] for t in sorted(a.keys() & b.keys()) if t >= LATE]
        yield {
            "differ in": differ_in,
            "from": first,
            "to": second,
            "model": model,
            "difference": f"{statistics.fmean(by_round):+.1f}",
            "ahead in": f"{sum(d > 0 for d in by_round)} of {len(by_round)}",
            "best of second": f"{max(b.values()):.2f}",
            "late of first": f"{statistics.fmean(v for t, v in a.items() if t >= LATE):.2f}",
            "late of second": f"{statistics.fmean(v for t, v in b.items() if t >= LATE):.2f}",
        }


def moves() -> Iterator[dict[str, Any]]:
    """Yield how far accuracy moves between two evaluations from round 500 on."""
    runs = [
        ("feddyn", "global"),
        ("ditto", "global"),
        ("ditto", "personal"),
        ("fedslr", "global"),
        ("fedslr", "personal"),
    ]
    for method, model in runs:
        found = [v for t, v in accuracies(f"{method}-authors", model).items() if t >= 500]
        steps = [b - a for a, b in itertools.pairwise(found)]
        yield {
            "run": f"{method}-authors",
            "model": model,
            "std of moves": f"{statistics.pstdev(steps):.1f}",
            "last move": f"{steps[-1]:+.1f}",
            "best": f"{max(found):.2f}",
        }


def broken() -> Iterator[dict[str, Any]]:
    """Yield how many personal models broke from round 500 on, and their cost in points at round 1000."""
    for run in ("fedslr-authors", "ditto-authors", "ditto-authors-tf32"):
        found = [(r["round"], r["accuracy_personal_per_client"]) for r in records(run) if "accuracy_personal" in r]
        breaks = []
        for i, (t, each) in enumerate(found):
            around = [clients for _, clients in found[max(0, i - 4) : i + 5]]
            usual = [statistics.median(clients[c] for clients in around) for c in range(len(each))]
            breaks += [(t, c) for c, accuracy in enumerate(each) if t >= 500 and accuracy < usual[c] - BREAK]
        last_round, last = found[-1]
        intact = [accuracy for c, accuracy in enumerate(last) if (last_round, c) not in breaks]
        yield {
            "run": run,
            "broken": len(breaks),
            "of": sum(len(each) for t, each in found if t >= 500),
            "in the last round": str([c for t, c in breaks if t == last_round]),
            "cost there": f"{100 * (statistics.fmean(intact) - statistics.fmean(last)):.1f}",
        }


def local() -> Iterator[dict[str, Any]]:
    """Yield Local's mean accuracy on both splits in the rounds that both runs have."""
    for run in ("local", "local-authors-738-rounds"):
        found = [v for t, v in accuracies(run, "personal").items() if 500 <= t <= 725]
        yield {"run": run, "rounds 500 to 725": f"{statistics.fmean(found):.1f}"}


def training_seconds() -> Iterator[dict[str, Any]]:
    """Yield the training seconds that one round in twenty stays below: those with the card to itself."""
    for run in ("ditto-authors", "ditto-authors-tf32", "feddyn-authors", "feddyn-authors-tf32"):
        train = [r["seconds_by"]["train"] for r in records(run)]
        yield {"run": run, "seconds": f"{statistics.quantiles(train, n=20)[0]:.2f}"}


STUDENT_95 = 2.776
"""The 97.5 % quantile of Student's distribution for the four degrees of freedom of six runs in two groups."""


def interval() -> Iterator[dict[str, Any]]:
    """Yield the late means of FedAvg's starts (`rounding.py`), and the 95 % interval of TF32 minus bf16."""
    runs = json.loads(Path("results/benchmarks/rounding.json").read_text())["runs"]
    late: dict[str, list[float]] = {"bf16": [], "tf32": []}
    for run in runs:
        late[run["precision"]].append(statistics.fmean(a for t, a in run["evaluations"] if t > 237))
    bf16, tf32 = late["bf16"], late["tf32"]
    degrees = len(bf16) + len(tf32) - 2
    pooled = sum((x - statistics.fmean(group)) ** 2 for group in (bf16, tf32) for x in group) / degrees
    half = STUDENT_95 * (pooled * (1 / len(bf16) + 1 / len(tf32))) ** 0.5
    gap = statistics.fmean(tf32) - statistics.fmean(bf16)
    yield {
        "bf16": " ".join(f"{x:.2f}" for x in bf16),
        "tf32": " ".join(f"{x:.2f}" for x in tf32),
        "difference": f"{gap:.1f}",
        "interval": f"{gap - half:.1f} to {gap + half:.1f}",
    }


def labels(root: str) -> Iterator[dict[str, Any]]:
    """Yield the share of cats and ships in what clients are tested on, averaged over clients."""
    for split, seed in (("authors", 0), ("dirichlet", 0), ("dirichlet", 1)):
        clients = fedslr.load("cifar10", root=root, clients=100, split=split, alpha=0.1, reuse=True, seed=seed).clients
        share = [100 * statistics.fmean(float((c.y_test == k).float().mean()) for c in clients) for k in (3, 8)]
        yield {"split": split, "seed": seed, "cats %": f"{share[0]:.1f}", "ships %": f"{share[1]:.1f}"}


def cohort(root: str) -> Iterator[dict[str, Any]]:
    """Yield how uneven the labels of round 1000's cohort are among all rounds."""
    clients = fedslr.load("cifar10", root=root, clients=100, split="authors", alpha=0.1, seed=0).clients
    counts = torch.stack([c.y.bincount(minlength=10) for c in clients]).double()
    whole = counts.sum(0) / counts.sum()
    distances = []
    for record in records("fedslr-authors"):
        chosen = counts[record["clients"]].sum(0)
        distances.append(float((chosen / chosen.sum() - whole).abs().sum()) / 2)
    farther = sum(d > distances[-1] for d in distances)
    yield {"round": len(distances), "distance": f"{distances[-1]:.2f}", "rounds farther": farther}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--root", help="folder with CIFAR-10; without it the figures that need images are left out")
    root: str | None = options.parse_args().root
    tables = [differences(), moves(), broken(), local(), training_seconds(), interval()]
    titles = [
        differences.__doc__,
        moves.__doc__,
        broken.__doc__,
        local.__doc__,
        training_seconds.__doc__,
        interval.__doc__,
    ]
    if root:
        tables += [labels(root), cohort(root)]
        titles += [labels.__doc__, cohort.__doc__]
    for title, rows in zip(titles, tables, strict=True):
        print(f"\n{(title or '').removeprefix('Yield ').rstrip('.')}:")
        report.show(list(rows))


if __name__ == "__main__":
    report.call(main)
