"""`run`: train a method on a federation, from Python or from a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedslr.algorithms import naming
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.group import Group
from fedslr.core.types import Loss
from fedslr.data import build_federation
from fedslr.data.federation import Federation
from fedslr.engine import distributed
from fedslr.engine.settings import CUSTOM, DTYPES
from fedslr.engine.setup import require_possible
from fedslr.models import MODELS
from fedslr.run.execution import OnRound, RunRequest, execute
from fedslr.run.recipe_text import dump
from fedslr.run.recipes import Recipe, build_settings
from fedslr.run.result import Result


def run(
    algorithm: Algorithm[Any, Any, Any],
    federation: Federation,
    model: str | nn.Module = "cnn",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    loss: Loss | str | None = None,
    on_round: OnRound | None = None,
    should_stop: Callable[[], bool] | None = None,
    warn: Callable[[str], None] | None = None,
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train a federation and return its models and figures.

    In a script started by torchrun every process calls `run` with the same arguments. The clients are then divided
    between the processes, and the first process writes the folder.

    Args:
        algorithm: The method, such as `fedslr.FedSLR()`.
        federation: The clients' data, from `fedslr.load` or `Federation.from_arrays`.
        model: The name of a model, or an `nn.Module` whose weights are the starting point.
        out: The folder of the run. Without one nothing is written, and the run cannot be resumed.
        resume: Whether to go on with the run in `out`.
        loss: The name of a loss, or a function of a batch's outputs and targets that returns the loss of every sample,
            or the mean loss. By default the task's own loss.
        on_round: Called with the record of every finished round. A function with two required arguments also receives
            the run's `TrainedModels`, such as `on_round(record, run)` with `run.personal_params(3)`.
        should_stop: Asked after every round; if it returns true, the run saves and raises `Interrupted`. Without it,
            ctrl-C ends a run that has a folder after its current round.
        warn: Called with every warning; by default warnings go through Python's `warnings`.
        progress: Whether to show the round, the accuracies and the time left; by default if the output goes to a
            terminal or a notebook. Elsewhere, True prints a line per evaluation.
        track: The trackers that receive every round: tensorboard, mlflow, wandb.
        **settings: The fields of `fedslr.Settings`, such as rounds, clients_per_round, lr, batch_size, epochs, seed,
            device and dtype. `selection` may be a function, see `fedslr.engine.selection`. A table of a recipe, such
            as `optimizer`, is a dictionary.

    Returns:
        The models and figures of the run.

    Raises:
        FedslrError: The request or the folder is wrong, or training diverged.
        Interrupted: `should_stop` ended the run; it can be resumed.

    Example:
        federation = fedslr.load("digits", clients=20)
        result = fedslr.run(fedslr.FedSLR(), federation, model="cnn", rounds=30, clients_per_round=5)
    """
    group = distributed.join()
    request = checked_request(algorithm, federation, model, group, loss=loss, **settings)
    request = replace(
        request,
        out=None if out is None else Path(out),
        resume=resume,
        on_round=on_round,
        should_stop=should_stop,
        track=track,
        progress=progress,
        warn=warn or (lambda text: warnings.warn(text, stacklevel=3)),
    )
    return execute(request, group)


def checked_request(
    algorithm: Algorithm[Any, Any, Any],
    federation: Federation,
    model: str | nn.Module,
    group: Group,
    *,
    loss: Loss | str | None = None,
    **settings: Any,
) -> RunRequest:
    """Return a run that was asked for in Python; refuse a wrong request before anything is trained."""
    if not isinstance(algorithm, Algorithm) or not isinstance(federation, Federation):
        got = f"{algorithm!r} and a {type(federation).__name__}"
        raise FedslrError(f"run: got {got}, expected a method such as fedslr.FedSLR() and a federation of fedslr.load")
    naming.require_usable(type(algorithm))
    selection = settings.get("selection")
    named_loss = "cross_entropy" if loss is cross_entropy else loss
    checked = build_settings(_plain({**settings, "loss": named_loss})).with_resolved_precision()
    federation = federation.for_task(checked.task or federation.task)
    checked = checked.for_task(federation.task)
    require_possible(checked, algorithm, group)
    table = dict(federation.options or {"name": federation.name, "clients": len(federation.clients)})
    return RunRequest(
        algorithm=algorithm,
        federation=federation,
        model=model,
        settings=checked,
        config=dump(checked, algorithm, table, {"name": _model_name(model)}),
        loss=named_loss if callable(named_loss) else None,
        select=selection if callable(selection) else None,
    )


def run_recipe(recipe: Recipe, out: Path, *, warn: Callable[[str], None] | None = None, **options: Any) -> Result:
    """Run a recipe in a folder; `options` are the fields of `RunRequest` that a recipe does not have."""
    warn = warn or warnings.warn
    recipe = resolved(recipe)
    group = distributed.join()
    require_possible(recipe.settings, recipe.algorithm, group)
    # The first process decodes images for all.
    federation = group.after_first(lambda: build_federation(recipe.data, warn, recipe.settings.task))
    request = RunRequest(
        algorithm=recipe.algorithm,
        federation=federation,
        model=recipe.model.name,
        settings=recipe.settings,
        config=recipe.to_toml(),
        out=out,
        warn=warn,
        **options,
    )
    return execute(request, group)


def resolved(recipe: Recipe) -> Recipe:
    """Return a recipe with the precision, the task, the loss and the metrics that its run will have."""
    settings = recipe.settings.with_resolved_precision()
    return replace(recipe, settings=settings.for_task(settings.task or recipe.data.task()))


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace torch's own types, and functions, by the names that recipes use."""
    names: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}

    def named(key: str, value: Any) -> Any:
        if isinstance(value, torch.dtype | torch.device):
            return names.get(value, str(value))
        if key == "metrics" and not isinstance(value, str):
            return tuple(f"{one.__module__}:{one.__name__}" if callable(one) else one for one in value)
        return CUSTOM if key in ("selection", "loss") and callable(value) else value

    return {key: named(key, value) for key, value in settings.items()}


def _model_name(model: str | nn.Module) -> str:
    if isinstance(model, str):
        return model
    return next((name for name, kind in MODELS.items() if kind is type(model)), type(model).__name__)
