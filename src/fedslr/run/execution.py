"""`execute`: a checked run, from its folder to its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import Interrupted
from fedslr.core.group import Group
from fedslr.core.interrupts import Stop, stop_on_ctrl_c
from fedslr.core.types import Loss
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.engine.selection import Select
from fedslr.engine.settings import CUSTOM, Settings
from fedslr.report.html_report import write_report
from fedslr.report.label_skew import MAX_COUNTED_CLIENTS, label_counts
from fedslr.run.folders import has_results, has_rounds, open_together
from fedslr.run.result import Result
from fedslr.run.summary import figures, is_rerunnable, summarize
from fedslr.run.trackers import TrackedRun, Tracking
from fedslr.storage.record import Record, read_records

Warn = Callable[[str], None]


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
    on_round: Callable[[Record], None] | None = None
    should_stop: Callable[[], bool] | None = None
    track: Sequence[str] = ()
    warn: Warn


def execute(request: RunRequest, group: Group) -> Result:
    """Train what is left of a run, write its results, and return them."""
    ctrl_c, tracking = Stop(), Tracking(request.track, request.warn)
    group.should_stop = request.should_stop or ctrl_c.__bool__
    with contextlib.ExitStack() as ending:
        folder = None
        if request.out is not None:
            folder = open_together(group, request.out, request.resume, request.config, request.algorithm)
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
        try:
            result = _train(request, simulation, tracking, ctrl_c)
            summary = result.summary
        finally:
            tracking.finish(summary)
            if folder is not None and group.first:
                _write_report(folder.path, request.warn)
    if ctrl_c:
        raise KeyboardInterrupt("the run came to its end before it could be stopped")
    return result


def _train(request: RunRequest, simulation: Simulation, tracking: Tracking, ctrl_c: Stop) -> Result:
    """Run the rounds that are left and write the summary."""
    group, settings, folder = simulation.group, simulation.settings, simulation.folder
    records = group.from_first(lambda: read_records(folder.path) if folder else [])
    finished = folder is not None and simulation.state.done == settings.rounds and has_results(folder.path)
    if folder is not None and not finished:
        folder.write_config(request.config)
        folder.write_labels(label_counts(request.federation, MAX_COUNTED_CLIENTS).tolist())
        folder.forget_results()
    if group.first and simulation.state.done < settings.rounds:
        name = folder.path.name if folder else request.algorithm.name
        tracking.start(TrackedRun(name, request.config, folder.path if folder else None), records)
    for record in simulation.rounds():
        records.append(record.flat())
        tracking.log(records[-1])
        if request.on_round is not None:
            request.on_round(record)
        if group.stop() and simulation.state.done < settings.rounds:
            simulation.save()
            stopped = f"stopped after round {simulation.state.done} of {settings.rounds}"
            raise KeyboardInterrupt(f"{stopped}; go on with resume=True") if ctrl_c else Interrupted(stopped)
    given = _given_in_python(simulation, request.model)
    rerunnable = is_rerunnable(request.algorithm, request.federation, given)
    result = Result(simulation, records, summarize(figures(simulation), records, rerunnable, given))
    if folder is not None and not finished:
        folder.write_summary(result.summary)
    return result


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
