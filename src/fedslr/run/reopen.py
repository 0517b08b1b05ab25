"""`open_run`: a run folder in, its models and figures out, without training."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.types import Loss
from fedslr.data import build_federation
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import CUSTOM, Settings
from fedslr.report.saved_runs import read_run
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
    algorithm: Algorithm[Any, Any, Any] | None = None,
    device: str = "auto",
    loss: Loss | None = None,
    warn: Callable[[str], None] | None = None,
) -> Result:
    """Return the result of the run in a folder, as its newest checkpoint has it; the folder is not changed.

    Data, model and method are made again from `config.toml`. A custom federation, model, loss or method that `run` was
    given and that no recipe can name has to be given here too. The data, the model and the method's hyperparameters
    must be those of the run. A client's state is read when it is asked for.
    """
    folder = Path(path)
    warn = warn or (lambda text: warnings.warn(text, stacklevel=3))
    simulation = reopen(folder, federation, model, algorithm, device, loss, warn)
    rerunnable = federation is None and model is None and algorithm is None and loss is None
    if (folder / "summary.json").exists():
        summary, records = read_run(folder)
        if summary["rounds"] == simulation.state.done:
            return Result(simulation, records, summary, folder)
        # The newest checkpoint cannot be read, and an older one was.
        rerunnable = summary["rerunnable"]
    records = read_records(folder)[: simulation.state.done]
    return Result(simulation, records, summarize(figures(simulation), records, rerunnable), folder)


def reopen(
    folder: Path,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    algorithm: Algorithm[Any, Any, Any] | None = None,
    device: str = "cpu",
    loss: Loss | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Simulation:
    """Return the simulation of a run folder with the models of its newest checkpoint."""
    recipe = _recipe(folder, federation, model, algorithm, loss, warn)
    # The data may take long to decode, for nothing if there is no checkpoint.
    require_checkpoint(folder)
    # This machine may lack the engine or the precision that the run was trained with; its models do not need them.
    settings = replace(
        recipe.settings,
        device=device,
        engine="eager",
        precision="float32",
        store="memory",
        memory_budget=None,
        diagnostics=False,
    )
    simulation = Simulation(
        recipe.algorithm,
        federation or build_federation(recipe.data),
        model or recipe.model.name,
        settings,
        loss=loss,
        warn=warn,
    )
    simulation.look_into(folder)
    return simulation


def _recipe(
    folder: Path,
    federation: Federation | None,
    model: nn.Module | None,
    algorithm: Algorithm[Any, Any, Any] | None,
    loss: Loss | None,
    warn: Callable[[str], None],
) -> Recipe:
    """Return the recipe of the folder's run; the things that are given replace its own."""
    kept = folder / "config.toml"
    try:
        table: dict[str, Any] = tomllib.loads(kept.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = "no run in it (config.toml is missing)" if isinstance(error, FileNotFoundError) else error
        raise FedslrError(f"{folder}: {why}") from None
    if federation is not None:
        table["data"] = {"clients": len(federation.clients)}
    if model is not None:
        table["model"] = {}
    custom = table.get("loss") == CUSTOM
    if custom and loss is None:
        warn("this run was given a loss in Python; methods that train for an evaluation use cross_entropy instead")
    if custom or loss is not None:
        table.pop("loss", None)
    if algorithm is not None:
        now = tomllib.loads(recipe_text.dump(Settings(), algorithm, {}, {}))["algorithm"]
        if (was := table.get("algorithm")) != now:
            raise FedslrError(f"algorithm: got {now}, but the run's was {was}; expected the same")
        table["algorithm"] = {}
    # No more clients are selected, so a custom selection is not needed.
    table["selection"] = "uniform"
    try:
        recipe = recipes.parse(table)
    except FedslrError as error:
        hint = "give your own data, model, loss or method to fedslr.open_run in Python"
        raise FedslrError(f"{kept}: {error}; {hint}") from None
    return replace(recipe, algorithm=algorithm or recipe.algorithm)
