"""`open_run`: a run folder in, its models and figures out, without training."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedslr.algorithms import naming
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.types import Loss
from fedslr.data import share_out
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import CUSTOM, Settings
from fedslr.report import read_run
from fedslr.run import recipe_text, recipes
from fedslr.run.recipes import Recipe
from fedslr.run.result import Result
from fedslr.run.summary import figures, summarize
from fedslr.storage.checkpoint import require_checkpoint
from fedslr.storage.record import read_records


def open_run(
    path: str | Path,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    *,
    algorithm: Algorithm[Any, Any] | None = None,
    device: str = "auto",
    loss: Loss | None = None,
    warn: Callable[[str], None] | None = None,
) -> Result:
    """The result of the run in a folder, as its newest checkpoint has it; nothing in the folder is changed.

    Data, model and method are made again from `config.toml`. A federation, a model, a loss or a method of one's own
    that `run` was given and that no recipe can name has to be given here too; data and model are verified to be those
    of the run, and so are a method's hyperparameters. A client's state is read when it is asked for.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FedslrError(f"{folder}: no such folder")
    told = warn or (lambda text: warnings.warn(text, stacklevel=3))
    simulation = reopen(folder, federation, model, algorithm, device, loss, told)
    rerunnable = federation is None and model is None and algorithm is None and loss is None
    if (folder / "summary.json").exists():
        summary, records = read_run(folder)
        if summary["rounds"] == simulation.done:
            return Result(simulation, records, summary, folder)
        # The newest checkpoint cannot be read, and an older one was.
        rerunnable = summary.get("rerunnable", rerunnable)
    records = read_records(folder)[: simulation.done]
    made = summarize(figures(simulation), records, rerunnable)
    return Result(simulation, records, made, folder)


def reopen(
    folder: Path,
    federation: Federation | None,
    model: nn.Module | None,
    algorithm: Algorithm[Any, Any] | None,
    device: str,
    loss: Loss | None,
    warn: Callable[[str], None],
) -> Simulation:
    """The simulation of a run folder, to be looked at."""
    recipe = _recipe(folder, federation, model, algorithm, loss, warn)
    # Before anything is asked for that would be of no use.
    require_checkpoint(folder)
    # How it was trained does not matter to what it became, and another machine may not have it.
    settings = replace(
        recipe.settings,
        device=device,
        engine="eager",
        compile=False,
        precision="float32",
        store="memory",
        memory_budget=None,
        diagnostics=False,
    )
    simulation = Simulation(
        recipe.algorithm,
        federation or share_out(recipe.data),
        model or recipe.model.name,
        settings,
        loss=loss,
        warn=warn,
    )
    with naming.mistakes(recipe.algorithm):
        simulation.look_into(folder)
    return simulation


def _recipe(
    folder: Path,
    federation: Federation | None,
    model: nn.Module | None,
    algorithm: Algorithm[Any, Any] | None,
    loss: Loss | None,
    warn: Callable[[str], None],
) -> Recipe:
    """What the folder's run was asked to do, less what is given."""
    kept = folder / "config.toml"
    try:
        table: dict[str, Any] = tomllib.loads(kept.read_text("utf-8"))
    except FileNotFoundError:
        raise FedslrError(f"{folder}: no run in it (config.toml is missing)") from None
    except (OSError, ValueError) as error:
        raise FedslrError(f"{kept}: cannot be read: {error}") from None
    if federation is not None:
        table["data"] = {"clients": len(federation.clients)}
    if model is not None:
        table["model"] = {}
    if (was := table.get("loss")) == CUSTOM and loss is None:
        warn("this run was given a loss in Python; where a method learns to be evaluated, it is by cross_entropy")
    if was == CUSTOM or loss is not None:
        table.pop("loss", None)
    if algorithm is not None:
        if not isinstance(algorithm, Algorithm):
            raise FedslrError(f"algorithm: got {algorithm!r}, expected a method such as fedslr.FedSLR()")
        naming.require_usable(type(algorithm))
        now = tomllib.loads(recipe_text.dump(Settings(), algorithm, {}, {}))["algorithm"]
        was = {"name": "", **table.get("algorithm", {})}
        same = naming.are_same(was["name"], now["name"], algorithm.name)
        if not same or {**was, "name": ""} != {**now, "name": ""}:
            raise FedslrError(f"algorithm: got {now}, but the run's was {was}; expected the same")
        table["algorithm"] = {}
    # Nobody is drawn any more, by whatever function it was.
    table["selection"] = "uniform"
    try:
        recipe = recipes.parse(table)
    except FedslrError as error:
        raise FedslrError(f"{kept}: {error}; what is your own is given to fedslr.open_run in Python") from None
    return replace(recipe, algorithm=algorithm or recipe.algorithm)
