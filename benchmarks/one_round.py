"""Compare one round of FedAvg in several precisions, from the same model.

    python benchmarks/one_round.py recipes/paper/cifar10-dirichlet.toml --first 41 --last 60 \
        --json results/benchmarks/one_round.json

A run in TF32 leads. Before every round from the first to the last, the runs in other precisions receive its model
and train the same cohort on the same batches. All are compared with float32: "distance" is the distance between the
two updates and "length" the length of one, both divided by the length in float32. "gain" is the accuracy in % beyond
float32's, with all models evaluated in TF32. "judged" is the change in accuracy if a model is evaluated in the
precision that trained it. `rounding.py` shows that any two runs drift apart; this benchmark shows whether a
precision is biased.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch

import report
from fedslr import models
from fedslr.algorithms.averaged import Server
from fedslr.core.types import Params
from fedslr.data import build_federation
from fedslr.data.federation import Federation
from fedslr.engine.aggregation import ServerState
from fedslr.engine.rounds import Simulation
from fedslr.run import recipes

LEADS, EXACT = "tf32", "float32"


class Follower:
    """A run in one precision that can continue from another run's model at any round."""

    def __init__(self, federation: Federation, recipe: recipes.Recipe) -> None:
        model = models.build(recipe.model.name, federation.input_shape, federation.num_classes, recipe.settings.seed)
        self.run = Simulation(recipe.method("fedavg"), federation, model, recipe.settings)

    @property
    def model(self) -> Params:
        shared: Params = self.run.state.server_state.server.w
        return shared

    def round(self) -> Params:
        self.run._round()
        return self.model

    def round_after(self, model: Params, done: int) -> Params:
        """Return the model after a round from the given one. It is the whole state: FedAvg's clients keep none."""
        state = self.run.state
        state.start_from(state.start, ServerState(Server({k: x.clone() for k, x in model.items()}), ()), done)
        self.run.training._expected = {}
        return self.round()

    @torch.no_grad()
    def accuracy(self, model: Params) -> float:
        """Return the mean accuracy over all clients in %."""
        found = self.run.engine.accuracy(model, range(self.run.num_clients))
        return 100 * statistics.fmean(x for x in found if x is not None)


def apart(before: Params, made: Params, exact: Params) -> tuple[float, float]:
    """Return an update's distance from the exact one and its length, both divided by the exact one's length."""
    pairs = [(made[k] - x, exact[k] - x) for k, x in before.items()]
    length = math.sqrt(sum(float(b.square().sum()) for _, b in pairs))
    distance = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return distance / length, math.sqrt(sum(float(a.square().sum()) for a, _ in pairs)) / length


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over the rounds for every precision, and the standard error of the gain."""
    made = []
    for precision in dict.fromkeys(line["precision"] for line in found):
        lines = [line for line in found if line["precision"] == precision]
        mean = {k: statistics.fmean(line[k] for line in lines) for k in ("distance", "length", "gain", "judged")}
        error = statistics.stdev(line["gain"] for line in lines) / math.sqrt(len(lines)) if len(lines) > 1 else None
        made.append({"precision": precision, "rounds": len(lines), **mean, "error": error})
    return made


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("recipe", type=Path)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    options.add_argument("--first", type=int, default=41, help="the first compared round")
    options.add_argument("--last", type=int, default=60)
    options.add_argument("--json", help="also write the figures to this file")
    given = options.parse_args()
    if not 1 <= given.first <= given.last:
        options.error("--first and --last must be rounds counted from 1, the first not after the last")
    report.require_gpu()
    changes = [*given.set, f"rounds={given.last + 1}", f"evaluate.every={given.last + 1}"]
    asked = {p: recipes.read(given.recipe, [*changes, f"precision={p}"]) for p in (LEADS, "bf16", EXACT)}
    federation = build_federation(asked[LEADS].data)
    runs = {p: Follower(federation, recipe) for p, recipe in asked.items()}
    judge, found = runs[LEADS], []
    for done in range(given.last):
        before = judge.model
        made = {LEADS: judge.round()}
        if done + 1 < given.first:
            continue
        made |= {p: run.round_after(before, done) for p, run in runs.items() if p != LEADS}
        accuracy = {p: judge.accuracy(model) for p, model in made.items()}
        for p in (LEADS, "bf16"):
            distance, length = apart(before, made[p], made[EXACT])
            own = accuracy[p] if p == LEADS else runs[p].accuracy(made[p])
            figures = {"distance": distance, "length": length, "gain": accuracy[p] - accuracy[EXACT]}
            found.append({"round": done + 1, "precision": p, **figures, "judged": own - accuracy[p]})
        print(f"round {done + 1}:", *(f"{p} {a:.2f}" for p, a in accuracy.items()), flush=True)
        report.write("one_round", {"runs": found, "rows": rows(found)}, given.json)
    print()
    report.show(rows(found))


if __name__ == "__main__":
    report.call(main)
