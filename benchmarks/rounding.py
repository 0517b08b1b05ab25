"""Runs of one seed whose starts are a rounding error apart, by the precision of products.

    python benchmarks/rounding.py recipes/paper/cifar10-dirichlet.toml --methods fedavg --precisions bf16 tf32 \
        --starts 4 --rounds 100 --json results/benchmarks/rounding.json

Two runs of the same seed drift apart by rounding alone, and keep a distance for many rounds: one run in either
precision tells nothing. So every precision has several, from starts that differ in the last digits, and means stand
beside the deviations within each precision. Figures are the global model's accuracy in %, the mean over
the evaluations of the second half of the rounds (the personal models' where a method has no global one).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import report
from fedslr import config, models
from fedslr.data import share_out
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation

STEP = 1e-6
"""Relative distance between starts: some units in the last place of single precision."""


def evaluations(federation: Federation, recipe: config.Recipe, method: str, start: int) -> Iterator[tuple[int, float]]:
    """Round and accuracy of a run from its start."""
    settings = recipe.settings
    model = models.build(recipe.model.name, federation, settings.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + STEP * start)
    simulation = Simulation(recipe.method(method), federation, model, settings)
    for record in simulation.rounds():
        found = record.accuracy_personal if record.accuracy_global is None else record.accuracy_global
        if found is not None:
            yield record.round, 100 * found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("recipe", type=Path)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value in the recipe")
    options.add_argument("--methods", nargs="+", default=["fedavg"])
    options.add_argument("--precisions", nargs="+", default=["bf16", "tf32"])
    options.add_argument("--starts", type=int, default=4)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--every", type=int, default=5, help="rounds from one evaluation to the next")
    options.add_argument("--json", help="where to write the figures")
    given = options.parse_args()
    if given.starts < 2:
        options.error("--starts: one run has no deviation; expected 2 or more")
    recipe = config.read(given.recipe, given.set)
    federation = share_out(recipe.data)
    rows: list[dict[str, Any]] = []
    for method in given.methods:
        for precision in given.precisions:
            asked = replace(recipe.settings, rounds=given.rounds, evaluate_every=given.every, precision=precision)
            means = []
            for start in range(given.starts):
                found = list(evaluations(federation, replace(recipe, settings=asked), method, start))
                late = [accuracy for round, accuracy in found if round > given.rounds // 2]
                means.append(statistics.fmean(late))
                print(method, precision, f"start {start}:", *(f"{a:.2f}" for _, a in found), flush=True)
            rows.append(
                {
                    "method": method,
                    "precision": precision,
                    "starts": given.starts,
                    "rounds": given.rounds,
                    "accuracy": statistics.fmean(means),
                    "deviation": statistics.stdev(means),
                    "means": means,
                }
            )
            report.show([{k: v for k, v in row.items() if k != "means"} for row in rows])
    report.finish("rounding", rows, given.json)


if __name__ == "__main__":
    main()
