"""`run`: a method, a federation and a model in; a trained result out."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedslr.algorithms import naming
from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, Interrupted
from fedslr.core.interrupts import Stop, stop_on_ctrl_c
from fedslr.core.types import Loss
from fedslr.data import share_out
from fedslr.data.federation import Federation
from fedslr.engine import distributed
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import CUSTOM, DTYPES, Settings
from fedslr.models import MODELS
from fedslr.report.page import write_report
from fedslr.report.split import COUNTED, label_counts
from fedslr.run.folders import has_results, has_rounds, open_together
from fedslr.run.recipe_text import dump
from fedslr.run.recipes import Recipe
from fedslr.run.result import Result
from fedslr.run.resumption import fixed_on_resume
from fedslr.run.summary import figures, is_rerunnable, summarize
from fedslr.run.trackers import Run as Tracked
from fedslr.run.trackers import Tracking
from fedslr.storage.record import Record, read_records


def run(
    algorithm: Algorithm[Any, Any],
    federation: Federation,
    model: str | nn.Module = "cnn",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    loss: Loss | str = cross_entropy,
    on_round: Callable[[Record], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    warn: Callable[[str], None] | None = None,
    config: str | None = None,
    track: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train a federation and return its models and figures.

    A model is a name or an `nn.Module`, whose own weights are the starting point; a loss is a name or a function of
    scores and labels. `settings` are the fields of
    `fedslr.Settings`: rounds, clients_per_round, batch_size, epochs, personal_epochs, lr, lr_decay, weight_decay,
    selection (a name or a function, see `fedslr.engine.cohort`), seed, device, dtype, engine, compile, precision,
    store, memory_budget, diagnostics, evaluate_every, evaluate_clients, checkpoint_every, checkpoint_minutes. With
    `out` the run is written to a folder and can be resumed; `on_round` sees every finished round; when `should_stop`
    says so, the run saves and raises `Interrupted`, and at Ctrl-C it saves after the round it is in. `track` names
    trackers that are told every round: tensorboard, mlflow, wandb. In a script started by torchrun every process calls
    this, with the same arguments; clients are shared out, and the first process writes the folder.
    """
    if not isinstance(algorithm, Algorithm):
        raise FedslrError(f"algorithm: got {algorithm!r}, expected a method such as fedslr.FedSLR()")
    if not isinstance(federation, Federation):
        raise FedslrError("federation: expected what fedslr.load or Federation.from_arrays gives")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise FedslrError(f"out: got {out!r}, expected the path of a folder")
    if out is not None and not os.fspath(out):
        raise FedslrError("out: got nothing, expected the path of a folder")
    naming.require_usable(type(algorithm), folder=out is not None)
    functions = (("on_round", on_round), ("should_stop", should_stop), ("warn", warn))
    for name, function in (*functions, ("loss", None if isinstance(loss, str) else loss)):
        if function is not None and not callable(function):
            raise FedslrError(f"{name}: got {function!r}, expected a function")
    select = settings.get("selection") if callable(settings.get("selection")) else None
    known = "cross_entropy" if loss is cross_entropy else loss
    for name, asked in (("selection", settings.get("selection")), ("loss", known)):
        if asked == CUSTOM:
            raise FedslrError(f"{name}: for a custom one give the function itself")
    checked = schema.build(Settings, _plain({**settings, "loss": known})).settled()
    tell = warn or (lambda text: warnings.warn(text, stacklevel=3))
    text = config or dump(checked, algorithm, _data_table(federation), {"name": _model_name(model)})
    checked.cohort_size(len(federation.clients))
    own = None if isinstance(known, str) else known
    pressed = Stop()
    group = distributed.join(should_stop or pressed.__bool__)
    tracking = Tracking(_tracker_names(track), tell)
    folder = (
        None
        if out is None
        else open_together(group, Path(out), resume, text, algorithm.name, fixed_on_resume(algorithm))
    )
    # Whatever happens, and whichever of these fails: the folder is free again when all the others are done.
    with contextlib.ExitStack() as ending:
        if folder is not None:
            ending.callback(folder.close)
            if should_stop is None:
                ending.enter_context(stop_on_ctrl_c(pressed, tell))
            if group.first:
                ending.push(_reporting(folder.path, tell))
        ending.callback(tracking.finish, None)
        with naming.mistakes(algorithm):
            simulation = Simulation(algorithm, federation, model, checked, folder, own, tell, select, group)
        ending.callback(simulation.store.close)
        if resume:
            with naming.mistakes(algorithm):
                simulation.resume()
        else:
            simulation.begin()
        records = group.from_first(lambda: read_records(folder.path) if folder else [])
        finished = folder is not None and simulation.done == checked.rounds and has_results(folder.path)
        if folder is not None and not finished:
            folder.write_config(text)
            folder.write_labels(label_counts(federation, COUNTED).tolist())
            folder.forget_results()
        if group.first and simulation.done < checked.rounds:
            name = folder.path.name if folder else algorithm.name
            tracking.start(Tracked(name, text, folder.path if folder else None), records)
        for record in _rounds(simulation):
            records.append(asdict(record))
            tracking.log(records[-1])
            if on_round is not None:
                on_round(record)
            if group.stop() and simulation.done < checked.rounds:
                simulation.save()
                where = f"stopped after round {simulation.done} of {checked.rounds}"
                raise KeyboardInterrupt(f"{where}; go on with resume=True") if pressed else Interrupted(where)
        with naming.mistakes(algorithm):
            given = _given(simulation, model)
            again = is_rerunnable(algorithm, federation, given)
            result = Result(simulation, records, summarize(figures(simulation), records, again, given))
        if folder is not None and not finished:
            folder.write_summary(result.summary)
        tracking.finish(result.summary)
    if pressed:
        raise KeyboardInterrupt("the run came to its end before it could be stopped")
    return result


def _given(simulation: Simulation, model: str | nn.Module) -> dict[str, str]:
    """What a run was given that config.toml has no name for, but data: what tells it from others in a table."""
    named = {name: getattr(simulation.settings, name) for name in ("loss", "selection")}
    given = {name: simulation.functions[name] for name, text in named.items() if text == CUSTOM}
    if not isinstance(model, str):
        given["model"] = f"{type(model).__name__} {simulation.architecture}"
    return given


def _rounds(simulation: Simulation) -> Iterator[Record]:
    """The rounds of a simulation; not what is done with their records."""
    made = simulation.rounds()
    while True:
        with naming.mistakes(simulation.algorithm):
            record = next(made, None)
        if record is None:
            return
        yield record


def _reporting(folder: Path, tell: Callable[[str], None]) -> Callable[..., None]:
    """report.html of a run, however it ends. A picture is no reason to lose a run, nor to say more of a failed one."""

    def report(kind: type[BaseException] | None, *_: object) -> None:
        try:
            # A run that is not yet finished forgets its report when it goes on.
            if has_rounds(folder) and not (folder / "report.html").exists():
                write_report([folder], folder / "report.html")
        except Exception as error:
            if kind is None:
                tell(f"report.html could not be written: {type(error).__name__}: {error}")

    return report


def _tracker_names(track: Any) -> Sequence[str]:
    if not isinstance(track, list | tuple) or not all(isinstance(name, str) for name in track):
        raise FedslrError(f"track: got {track!r}, expected a list of names such as ['tensorboard']")
    return track


def run_recipe(recipe: Recipe, out: Path, *, warn: Callable[[str], None] | None = None, **options: Any) -> Result:
    """Run a recipe in a folder; `options` are those of `run` that are no settings."""
    recipe = replace(recipe, settings=recipe.settings.settled())
    return run(
        recipe.algorithm,
        # The first process decodes images for all.
        distributed.join().after_first(lambda: share_out(recipe.data, warn or warnings.warn)),
        recipe.model.name,
        out=out,
        config=recipe.to_toml(),
        warn=warn,
        **options,
        **asdict(recipe.settings),
    )


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Torch's own types as the names recipes use."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    plain = dict(settings)
    if isinstance(plain.get("dtype"), torch.dtype):
        plain["dtype"] = names.get(plain["dtype"], str(plain["dtype"]))
    if isinstance(plain.get("device"), torch.device):
        plain["device"] = str(plain["device"])
    for name in ("selection", "loss"):
        if callable(plain.get(name)):
            plain[name] = CUSTOM
    return plain


def _model_name(model: str | nn.Module) -> str:
    if isinstance(model, str):
        return model
    return next((name for name, kind in MODELS.items() if kind is type(model)), type(model).__name__)


def _data_table(federation: Federation) -> dict[str, Any]:
    return (
        dict(federation.options)
        if federation.options
        else {"name": federation.name, "clients": len(federation.clients)}
    )
