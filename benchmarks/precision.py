"""Draw the accuracies of runs that differ only in precision, in one figure.

    python benchmarks/precision.py float32=results/precision/float32 bf16=results/cifar10-dirichlet0.1/fedslr \
        "bf16, another run=results/precision/bf16-before" --rounds 200 --out results/precision/accuracy.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import report
from fedslr.report.colours import PALETTE

Points = list[tuple[int, float, float]]
"""Per evaluation: the round, and the accuracies of the global and the personal models in %."""


def points(folder: Path, rounds: int) -> Points:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["round"], 100 * line["accuracy_global"], 100 * line["accuracy_personal"])
        for line in lines
        if "accuracy_global" in line and line["round"] <= rounds
    ]


def draw(runs: dict[str, Points]) -> Figure:
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, found), colour in zip(runs.items(), PALETTE, strict=False):
        rounds = [p[0] for p in found]
        for model, line in ((2, "-"), (1, "--")):
            label = f"{name}, {'personal' if model == 2 else 'global'}"
            axes.plot(rounds, [p[model] for p in found], color=colour, linestyle=line, marker="o", ms=3, label=label)
    axes.set(xlabel="round", ylabel="accuracy, % (mean over clients)", ylim=(0, 100))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="lower right")
    return figure


def table(runs: dict[str, Points]) -> str:
    """Return a Markdown table: a row per evaluation, and global / personal accuracy of every run."""
    at = {name: {p[0]: p for p in found} for name, found in runs.items()}
    rounds = sorted(set.intersection(*(set(found) for found in at.values())))
    rows: list[list[Any]] = [["round", *runs], ["---"] * (1 + len(runs))]
    rows += [[r, *(f"{found[r][1]:.1f} / {found[r][2]:.1f}" for found in at.values())] for r in rounds]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--out", help="write the figure to this file")
    given = options.parse_args()
    for run in given.runs:
        if "=" not in run:
            options.error(f"expected NAME=FOLDER instead of '{run}'")
    runs = {name: points(Path(folder), given.rounds) for name, folder in (run.split("=", 1) for run in given.runs)}
    print(table(runs))
    if given.out:
        draw(runs).savefig(given.out, dpi=150)


if __name__ == "__main__":
    report.call(main)
