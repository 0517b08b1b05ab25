"""Finished runs beside the paper's figures, as a table in Markdown.

    python benchmarks/against_paper.py results/cifar10-dirichlet0.1 > results/cifar10-dirichlet0.1/README.md

Every folder in the given one is a run of that recipe; its name does not matter, its summary says which method it was.
What there is to say about them is in `notes.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import report
from fedslr.storage.statistics import LATE_EVALUATIONS


class Figures(NamedTuple):
    """A row of the paper's Tables 1 and 2: accuracies in %, parameters in millions, communication in GB."""

    accuracy_global: float | None
    accuracy_personal: float | None
    parameters_global: float
    parameters_personal: float
    gigabytes: float


CIFAR10_DIRICHLET = {
    "scaffold": Figures(82.91, None, 11.17, 11.17, 1787.83),
    "feddyn": Figures(90.14, None, 11.17, 11.17, 893.92),
    "fedavg": Figures(82.89, None, 11.17, 11.17, 893.92),
    "fedslr": Figures(87.52, 95.30, 3.51, 3.96, 626.89),
    "perfedavg": Figures(None, 91.55, 11.17, 11.17, 893.92),
    "lgfedavg": Figures(None, 81.35, 11.17, 11.17, 0.41),
    "fedper": Figures(None, 93.41, 11.17, 11.17, 893.51),  # the authors' code has this method by FedRep's name
    "fedrep": Figures(None, 93.41, 11.17, 11.17, 893.51),
    "ditto": Figures(None, 94.39, 11.17, 11.17, 893.92),
    "apfl": Figures(None, 87.11, 11.17, 22.35, 893.92),
    "local": Figures(None, 82.17, 11.17, 11.17, 0.0),
    "fedspa": Figures(None, 93.19, 5.59, 5.59, 446.96),
}
"""CIFAR-10, Dirichlet 0.1, 1000 rounds."""


def pair(ours: float | None, paper: float | None, digits: int = 2) -> str:
    """Our figure, and the paper's in brackets."""
    left = "–" if ours is None else f"{ours:.{digits}f}"
    return left if paper is None else f"{left} ({paper:.{digits}f})"


def late(records: list[dict[str, Any]], model: str) -> str:
    """Mean and deviation of the last evaluations."""
    found = [100 * r[f"accuracy_{model}"] for r in records if r.get(f"accuracy_{model}") is not None][
        -LATE_EVALUATIONS:
    ]
    return f"{statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f}" if found else "–"


def row(folder: Path) -> list[str]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    config = tomllib.loads((folder / "config.toml").read_text())
    paper = CIFAR10_DIRICHLET[summary["algorithm"]]
    accuracy, parameters = summary["accuracy"], summary["parameters"]
    percent = {k: None if v is None else 100 * v for k, v in accuracy.items()}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [record["seconds"] for record in records]
    return [
        summary["algorithm"],
        f"{config['data']['split']}, {summary['seed']}",
        config.get("selection", "uniform"),
        str(summary["rounds"]),
        config.get("precision", "float32"),
        pair(percent["global"], paper.accuracy_global),
        late(records, "global"),
        pair(percent["personal"], paper.accuracy_personal),
        late(records, "personal"),
        pair(parameters["global"] / 1e6, paper.parameters_global),
        pair(parameters["personal"] / 1e6, paper.parameters_personal),
        pair(summary["paper_gb"], paper.gigabytes),
        pair(statistics.median(rounds), statistics.fmean(rounds[1:])),
        f"{sum(summary['seconds'].values()) / 60:.1f}",
    ]


HEADS = [
    "method",
    "split, seed",
    "cohorts",
    "rounds",
    "precision",
    "global %",
    "late",
    "personal %",
    "late",
    "global M",
    "personal M",
    "GB",
    "s/round",
    "minutes",
]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    folder: Path = options.parse_args().folder
    rows = [row(path.parent) for path in sorted(folder.glob("*/summary.json"))]
    print(f"# {folder.name}\n\nOurs, and in brackets the paper's (TMLR 2023, Tables 1 and 2).")
    print(f"Accuracies are the last evaluation's, late ones mean ± deviation of the last {LATE_EVALUATIONS}.")
    print(
        "Seconds are those of the median round and, in brackets, the mean of all but the first, evaluations included;"
    )
    print("minutes are all of a run: compiling, evaluations, checkpoints.\n")
    for line in [HEADS, ["---"] * len(HEADS), *rows]:
        print(f"| {' | '.join(line)} |")
    notes = folder / "notes.md"
    if notes.exists():
        print(f"\n{notes.read_text().strip()}")
    print(f"\nMade by `python benchmarks/against_paper.py {folder}`; every folder's `config.toml` runs it again.")


if __name__ == "__main__":
    report.call(main)
