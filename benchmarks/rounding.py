"""Run one seed from starts that differ by a rounding error, in several precisions.

    python benchmarks/rounding.py recipes/paper/cifar10-dirichlet.toml --methods fedavg --precisions bf16 tf32 \
        --starts 4 --rounds 475 --every 25 --json results/benchmarks/rounding.json --figure results/precision/starts.png

Two runs of the same seed drift apart by rounding alone and stay apart for many rounds, so a single run per precision
proves nothing. This benchmark runs every precision from several starts that differ in the last digits. It prints the
mean and the standard deviation within each precision: accuracy of the global model in % over the second half of the
rounds (of the personal models for a method without a global one). The figure shows the runs of the first method as
distances from their mean.

Runs in the JSON file are not repeated. You can stop the command between two runs and ask for more starts later.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import report
from fedslr import models
from fedslr.core.errors import FedslrError
from fedslr.data import build_federation
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.report.colours import PALETTE
from fedslr.run import recipes

STEP = 1e-6
"""The relative distance between starts: a few units in the last place of float32."""


def evaluations(federation: Federation, recipe: recipes.Recipe, method: str, start: int) -> Iterator[tuple[int, float]]:
    """Yield round and accuracy of a run from the given start."""
    settings = recipe.settings
    model = models.build(recipe.model.name, federation.input_shape, federation.num_classes, settings.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + STEP * start)
    simulation = Simulation(recipe.method(method), federation, model, settings)
    for record in simulation.rounds():
        found = record.accuracy_personal if record.accuracy_global is None else record.accuracy_global
        if found is not None:
            yield record.round, 100 * found


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard deviation of the runs' late accuracies, for every method and precision."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        half = run["evaluations"][-1][0] // 2
        late = statistics.fmean(accuracy for round, accuracy in run["evaluations"] if round > half)
        found.setdefault((run["method"], run["precision"]), []).append(late)
    return [
        {
            "method": method,
            "precision": precision,
            "starts": len(late),
            "accuracy": statistics.fmean(late),
            "std": statistics.stdev(late) if len(late) > 1 else None,
        }
        for (method, precision), late in found.items()
    ]


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Draw the runs of one method as distances from the mean of all."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    rounds = [round for round, _ in runs[0]["evaluations"]]
    mean = [statistics.fmean(a for _, a in each) for each in zip(*(run["evaluations"] for run in runs), strict=True)]
    colours = dict(zip(dict.fromkeys(run["precision"] for run in runs), PALETTE, strict=False))
    for run in runs:
        away = [a - b for (_, a), b in zip(run["evaluations"], mean, strict=True)]
        colour = colours[run["precision"]]
        axes.plot(rounds, away, color=colour, marker="o", ms=3, lw=1.2)
        beside = (6 + 14 * list(colours.values()).index(colour), -3)
        end = (rounds[-1], away[-1])
        axes.annotate(str(run["start"]), end, beside, textcoords="offset points", color=colour, fontsize=9)
    axes.axhline(0, color="0.7", lw=0.8)
    axes.set(xlabel="round", ylabel="accuracy beyond the mean of all, points")
    axes.set_xlim(0, rounds[-1] * 1.07)
    lines = [Line2D([], [], color=colour, marker="o", ms=3, lw=1.2) for colour in colours.values()]
    axes.legend(lines, list(colours), frameon=False, loc="lower left", title="precision; numbers are starts")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def kept(path: str | None, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in a file, which must be of this recipe."""
    if path is None or not Path(path).exists():
        return []
    try:
        there = json.loads(Path(path).read_text())
        known, runs = there["recipe"], list(there["runs"])
    except (ValueError, KeyError, TypeError):
        raise FedslrError(f"--json: {path} was not written by this benchmark; choose another file") from None
    if known != recipe:
        raise FedslrError(f"--json: {path} holds runs of another recipe or other options; choose another file")
    return runs


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("recipe", type=Path)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    options.add_argument("--methods", nargs="+", default=["fedavg"])
    options.add_argument("--precisions", nargs="+", default=["bf16", "tf32"])
    options.add_argument("--starts", type=int, default=4)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--every", type=int, default=5, help="rounds between two evaluations")
    options.add_argument("--json", help="write the runs to this file, and continue those already in it")
    options.add_argument("--figure", help="draw the runs in this file")
    given = options.parse_args()
    if given.starts < 2:
        options.error("--starts must be at least 2: one run has no standard deviation")
    changes = [*given.set, f"rounds={given.rounds}", f"evaluate.every={given.every}"]
    changed_by = {p: recipes.read(given.recipe, [*changes, f"precision={p}"]) for p in given.precisions}
    recipe = next(iter(changed_by.values()))
    asked = {k: v for k, v in recipe.to_table().items() if k not in ("algorithm", "precision", "device")}
    asked["data"].pop("root")
    asked["methods"] = {name: asdict(recipe.method(name)) for name in given.methods}  # type: ignore[call-overload]
    runs = kept(given.json, asked)
    done = {(run["method"], run["precision"], run["start"]) for run in runs}
    report.write("rounding", {"recipe": asked, "runs": runs, "rows": rows(runs)}, given.json)
    federation = build_federation(recipe.data)
    for method, (precision, changed), start in itertools.product(
        given.methods, changed_by.items(), range(given.starts)
    ):
        if (method, precision, start) in done:
            continue
        found = list(evaluations(federation, changed, method, start))
        print(method, precision, f"start {start}:", *(f"{a:.2f}" for _, a in found), flush=True)
        made = {"method": method, "precision": precision, "start": start, "evaluations": found}
        runs.append({**made, **{k: v for k, v in report.machine().items() if k in ("date", "commit", "card")}})
        report.write("rounding", {"recipe": asked, "runs": runs, "rows": rows(runs)}, given.json)
    report.finish("rounding", rows(runs), None)
    if given.figure:
        draw([run for run in runs if run["method"] == given.methods[0]]).savefig(given.figure, dpi=150)
        print(f"figure: {given.figure}")


if __name__ == "__main__":
    report.call(main)
