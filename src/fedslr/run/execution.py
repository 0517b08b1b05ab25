"""`execute`: a checked run, from its folder to its result."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import Interrupted
from fedslr.core.group import Group
from fedslr.core.interrupts import Stop, stop_on_ctrl_c
from fedslr.core.types import Loss
from fedslr.data.described import describe
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.engine.selection import Select
from fedslr.engine.settings import CUSTOM, Settings
from fedslr.report.html_report import write_report
from fedslr.report.label_skew import MAX_COUNTED_CLIENTS, label_counts
from fedslr.run.folders import has_results, has_rounds, open_together, planner_of
from fedslr.run.progress import RunDisplay, is_watched
from fedslr.run.result import Result
from fedslr.run.summary import figures, is_rerunnable, summarize
from fedslr.run.trackers import TrackedRun, Tracking
from fedslr.run.trained import TrainedModels
from fedslr.storage.record import Record, read_records

Warn = Callable[[str], None]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
OnRound = Callable[[Record], None] | Callable[[Record, TrainedModels], None]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run whose settings were checked."""

    algorithm: Algorithm[Any, Any, Any]
    federation: Federation
    model: str | nn.Module
    settings: Settings
    config: str
    """The text of config.toml."""
    loss: Loss | None = None
    """A loss that was given as a function; None for the one that the settings name."""
    select: Select | None = None
    out: Path | None = None
    resume: bool = False
    on_round: OnRound | None = None
    progress: bool | None = False
    """Whether to show progress; None shows it if a person watches."""
    should_stop: Callable[[], bool] | None = None
    track: Sequence[str] = ()
    warn: Warn = field(default=warnings.warn)


def execute(request: RunRequest, group: Group) -> Result:
    """Train what is left of a run, write its results, and return them."""
    ctrl_c, tracking = Stop(), Tracking(request.track, request.warn)
    group.should_stop = request.should_stop or ctrl_c.__bool__
    with contextlib.ExitStack() as ending:
        folder = None
        if request.out is not None:
            planner = planner_of(request.algorithm, request.settings)
            folder = open_together(group, request.out, request.resume, request.config, planner)
            ending.callback(folder.close)
            if request.should_stop is None:
                ending.enter_context(stop_on_ctrl_c(ctrl_c, request.warn))
        simulation = Simulation(
            request.algorithm,
            request.federation,
            request.model,
            request.settings,
            folder,
            loss=request.loss,
            warn=request.warn,
            select=request.select,
            group=group,
        )
        ending.callback(simulation.store.close)
        if request.resume:
            simulation.resume()
        else:
            simulation.begin()
        summary = None
        shown = group.first and (is_watched() if request.progress is None else request.progress)
        try:
            display = ending.enter_context(RunDisplay(request.settings.rounds, request.out, quiet=not shown))
            result = _train(request, simulation, tracking, ctrl_c, _listener(request, simulation, display))
            summary = result.summary
        finally:
            tracking.finish(summary)
            if folder is not None and group.first:
                _write_report(folder.path, request.warn)
    if ctrl_c:
        raise KeyboardInterrupt("the run came to its end before it could be stopped")
    return result


def _train(
    request: RunRequest, simulation: Simulation, tracking: Tracking, ctrl_c: Stop, tell: Callable[[Record], None]
) -> Result:
    """Run the rounds that are left and write the summary."""
    group, settings, folder = simulation.group, simulation.settings, simulation.folder
    records = group.from_first(lambda: read_records(folder.path) if folder else [])
    finished = folder is not None and simulation.state.done == settings.rounds and has_results(folder.path)
    if folder is not None and not finished:
        folder.write_config(request.config)
        data = describe(request.federation, simulation.state.digests["data"])
        folder.write_labels(label_counts(request.federation, MAX_COUNTED_CLIENTS).tolist(), data)
        folder.forget_results()
    if group.first and simulation.state.done < settings.rounds:
        name = folder.path.name if folder else request.algorithm.name
        tracking.start(TrackedRun(name, request.config, folder.path if folder else None), records)
    for record in simulation.rounds():
        records.append(record.flat())
        tracking.log(records[-1])
        tell(record)
        if group.stop() and simulation.state.done < settings.rounds:
            simulation.save()
            stopped = f"stopped after round {simulation.state.done} of {settings.rounds}"
            raise KeyboardInterrupt(f"{stopped}; go on with resume=True") if ctrl_c else Interrupted(stopped)
    given = _given_in_python(simulation, request.model)
    rerunnable = is_rerunnable(request.algorithm, request.federation, given)
    result = Result(simulation, records, summarize(figures(simulation), records, rerunnable, given), request.config)
    if folder is not None and not finished:
        folder.write_summary(result.summary)
    return result


def _listener(request: RunRequest, simulation: Simulation, display: RunDisplay) -> Callable[[Record], None]:
    """Return the function that receives every finished round: it shows the round and calls the caller's function."""
    given: Callable[..., None] | None = request.on_round
    more = [TrainedModels(simulation)] if given is not None and takes_models(given) else []

    def tell(record: Record) -> None:
        display.show(record)
        if given is not None:
            given(record, *more)

    return tell


def takes_models(function: Callable[..., None]) -> bool:
    """Return whether a callback has two required arguments. Defaults and `*args` do not count: `print` takes one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C do not tell
        return False
    return sum(p.default is p.empty and p.kind in POSITIONAL for p in parameters) > 1


def _given_in_python(simulation: Simulation, model: str | nn.Module) -> dict[str, str]:
    """Return the function or class names of a loss, a selection and a model that config.toml cannot name."""
    custom = [name for name in ("loss", "selection") if getattr(simulation.settings, name) == CUSTOM]
    given = {name: simulation.functions[name] for name in custom}
    if not isinstance(model, str):
        given["model"] = f"{type(model).__name__} {simulation.architecture[:8]}"
    return given


def _write_report(folder: Path, warn: Warn) -> None:
    """Write report.html, unless it is there. A picture that fails is no reason to lose a run."""
    try:
        if has_rounds(folder) and not (folder / "report.html").exists():
            write_report([folder], folder / "report.html")
    except Exception as error:
        warn(f"report.html could not be written: {type(error).__name__}: {error}")
