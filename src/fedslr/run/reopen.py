"""`open_run`: open a run folder for its models and figures, without training."""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, reason
from fedslr.core.types import Loss
from fedslr.data import build_federation
from fedslr.data.described import DescribedFederation, described
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
    """Return the result of the run in a folder, from its newest checkpoint. The folder is not changed.

    Data, model and method are made again from `config.toml`. A model, method or loss that `run` was given and that a
    recipe cannot name has to be given here too. A client's state is read when it is asked for.

    Args:
        path: The folder of the run.
        federation: The clients' data, if they do not come from a dataset that a recipe can name. Most models need none:
            the folder keeps shapes and names. Personal models that are made from the client's samples, such as those of
            Per-FedAvg and IFCA, ask for them.
        model: The network, if a recipe cannot name it. Its weights do not matter.
        algorithm: The method, if a recipe cannot name it, with the hyperparameters of the run.
        device: The device that the models are put on.
        loss: The loss, if a recipe cannot name it.
        warn: Called with every warning; by default warnings go through Python's `warnings`.

    Raises:
        FedslrError: The folder holds no run, or data, model or method are not those of the run.

    Example:
        result = fedslr.open_run("runs/one")
        network = result.personal_model(3)
    """
    folder = Path(path)
    warn = warn or (lambda text: warnings.warn(text, stacklevel=3))
    kept = _described(folder)
    known = kept if federation is None and kept is not None and kept.options is None else federation
    recipe = _recipe(folder, known, model, algorithm, loss, warn)
    # Decoding the data can take long; a missing checkpoint is reported before.
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
    data = known or _loaded(recipe, kept, warn)
    data = data.for_task(recipe.settings.task or data.task)
    simulation = Simulation(recipe.algorithm, data, model or recipe.model.name, settings, loss=loss, warn=warn)
    simulation.load_models(folder)
    rerunnable = known is None and model is None and algorithm is None and loss is None
    text = (folder / "config.toml").read_text("utf-8")
    if (folder / "summary.json").exists():
        summary, records = read_run(folder)
        if summary["rounds"] == simulation.state.done:
            return Result(simulation, records, summary, text, folder)
        # The newest checkpoint cannot be read, and an older one was.
        rerunnable = summary["rerunnable"]
    records = read_records(folder)[: simulation.state.done]
    return Result(simulation, records, summarize(figures(simulation), records, rerunnable), text, folder)


def _described(folder: Path) -> DescribedFederation | None:
    """Return the federation that the folder describes; runs of earlier versions describe none."""
    try:
        return described(json.loads((folder / "labels.json").read_text("utf-8"))["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _loaded(recipe: Recipe, kept: DescribedFederation | None, warn: Callable[[str], None]) -> Federation:
    """Return the data that a recipe names; without them, their description in the folder, if it has one."""
    try:
        return build_federation(recipe.data, task=recipe.settings.task)
    except FedslrError as error:
        if kept is None:
            raise
        warn(f"{error}; the run is opened without its data, which its models do not need")
        return kept


def _recipe(
    folder: Path,
    federation: Federation | None,
    model: nn.Module | None,
    algorithm: Algorithm[Any, Any, Any] | None,
    loss: Loss | None,
    warn: Callable[[str], None],
) -> Recipe:
    """Return the recipe of the folder's run, with those things in place of its own that are given."""
    kept = folder / "config.toml"
    try:
        table: dict[str, Any] = tomllib.loads(kept.read_text("utf-8"))
    except FileNotFoundError:
        raise FedslrError(f"{folder}: no run in it (config.toml is missing); name the folder of a run") from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else f"it is not valid TOML: {error}"
        raise FedslrError(f"{kept}: cannot be read: {why}; restore it") from None
    if federation is not None:
        table["data"] = {"clients": len(federation.clients)}
    if model is not None:
        table["model"] = {}
    custom = table.get("loss") == CUSTOM
    if custom and loss is None:
        warn("this run was given a loss in Python; methods that train for an evaluation use the task's own")
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
