"""`compare`: train several methods from Python, and put their results side by side."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.core.group import Group as ProcessGroup
from fedslr.core.interrupts import Stop, stop_on_ctrl_c
from fedslr.data.federation import Federation
from fedslr.engine import distributed
from fedslr.report import paper_figures
from fedslr.report.answer_tables import certainty
from fedslr.report.experiment_files import table_in, write_experiment
from fedslr.report.report_view import View
from fedslr.report.result_tables import Column, Table, columns, result_table
from fedslr.report.run_groups import Group
from fedslr.report.table_formats import FORMATS, html
from fedslr.run import experiments, result_frames, trackers
from fedslr.run.api import checked_request
from fedslr.run.jobs import run_jobs
from fedslr.run.progress import ExperimentDisplay, is_watched
from fedslr.run.python_jobs import PythonJob, packed
from fedslr.run.recipes import make_algorithm
from fedslr.run.result import Result
from fedslr.storage.locks import lock

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Method = Algorithm[Any, Any, Any]


class Comparison:
    """The results of several methods with one or more seeds.

    Attributes:
        results: The results of every method by its name, one per seed.
        failed: The reason why a run failed, by the name of the run.
        out: The folder of the runs, or None.
    """

    def __init__(self, results: Mapping[str, list[Result]], failed: Mapping[str, str], out: Path | None) -> None:
        self.results, self.failed, self.out = dict(results), dict(failed), out
        runs = {name: [result.as_run() for result in found] for name, found in results.items() if found}
        self._groups = [Group({"method": name}, found) for name, found in runs.items()]

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Return the tables of results and of differences for notebooks."""
        differences = self._differences()
        return html(result_table(self._groups, self._columns())) + (html(differences) if differences.rows else "")

    def table(self, format: str = "text", pick: str = "last", clients: str = "all") -> str:
        """Return the table that `fedslr compare` prints: means ± standard deviations over seeds.

        Args:
            format: text, markdown, csv or latex.
            pick: The metric of the "last", the "best" or the "late" (last five) evaluations.
            clients: The metric over "all" clients or over those "sampled" in that round.
        """
        return table_in(format, self._groups, self._columns(pick, clients))

    def _columns(self, pick: str = "last", clients: str = "all") -> list[Column]:
        return columns(pick, clients, self._groups[0].runs[0].metric)

    def differences(self, format: str = "text") -> str:
        """Return every method's difference to the best one, paired by seed, with its 95 % interval."""
        return FORMATS[format](self._differences())

    def _differences(self) -> Table:
        runs = [run for group in self._groups for run in group.runs]
        titles, rows, _ = certainty(View(runs, groups=self._groups))
        return Table(list(titles), [[c if isinstance(c, str) else c[0] for c in cells] for _, cells in rows], 1)

    def to_frame(self) -> DataFrame:
        """Return a pandas table with one row per run and the figures of `table` as columns.

        Raises:
            FedslrError: pandas is not installed.
        """
        return result_frames.frame(
            [
                {"method": group.name, "seed": run.summary["seed"], **{c.key: c.value(run) for c in self._columns()}}
                for group in self._groups
                for run in group.runs
            ]
        )

    def plot(self) -> Figure:
        """Return a matplotlib figure of the headline metric of all methods over rounds; bands span the seeds."""
        return paper_figures.accuracy_of(self._groups)


def compare(
    methods: Iterable[str | Method] | Mapping[str, str | Method],
    federation: Federation | Callable[[int], Federation],
    model: str | nn.Module = "cnn",
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    progress: bool | None = None,
    warn: Callable[[str], None] | None = None,
    track: Sequence[str] = (),
    **settings: Any,
) -> Comparison:
    """Train several methods on the same data, and return their results side by side.

    A seed sets the starting point, the cohorts and the batches, which are the same for all methods. A run that fails is
    reported as a warning and does not stop the others.

    Args:
        methods: Methods such as `fedslr.FedSLR()`, or names such as "fedavg" for their defaults. A mapping gives them
            names of your choice, for example to compare one method with several hyperparameters.
        federation: The clients' data for all seeds, or a function that returns the data for a seed.
        model: The name of a model, or an `nn.Module` whose weights are the starting point.
        seeds: The seeds. With two or more, `differences` tells which methods can be told apart.
        out: A folder for the runs, with the files of `fedslr compare`: a folder per run, tables, a figure, a report.
        resume: Whether to go on with the runs in `out`.
        jobs: The number of runs at once, each in a process of its own; needs `out`. A script must then call `compare`
            under `if __name__ == "__main__":`, and classes of your own must be in a module.
        progress: Whether to show the progress; by default if the output goes to a terminal or a notebook.
        warn: Called with every warning; by default warnings go through Python's `warnings`.
        track: The trackers that receive every round: tensorboard, mlflow, wandb.
        **settings: The settings of `fedslr.run`, such as rounds, clients_per_round, lr and loss.

    Raises:
        FedslrError: The request or the folder is wrong, or all runs failed.

    Example:
        methods = [fedslr.FedSLR(eta_g=5), fedslr.Ditto(), "fedavg"]
        comparison = fedslr.compare(methods, federation, model="cnn", seeds=[0, 1], rounds=30)
        print(comparison.table())
    """
    warn = warn or (lambda text: warnings.warn(text, FedslrWarning, stacklevel=3))
    home = None if out is None else Path(out)
    if distributed.several():
        raise FedslrError("torchrun: several processes work on one run (fedslr.run); compare starts its own with jobs")
    if jobs > 1 and home is None:
        raise FedslrError("jobs: runs in several processes need a folder; expected out='runs/mine' or jobs=1")
    if "seed" in settings:
        raise FedslrError(f"seed: a comparison takes a list; expected seeds=[{settings['seed']}]")
    for name in track:
        trackers.make(name)
    asked = _jobs(_named(methods), federation, model, experiments.checked_seeds(seeds), home, track, settings)
    if home is not None:
        experiments.require_fresh(asked, resume)
        experiments.require_no_run(home)
    failed = _run(asked, home, jobs, is_watched() if progress is None else progress, warn)
    results: dict[str, list[Result]] = {job.method: [] for job in asked}
    for job in asked:
        if job.name not in failed:
            results[job.method].append(job.result())
    if failed:
        text = experiments.failure_text(failed, len(asked))
        if len(failed) == len(asked):
            raise FedslrError(text)
        warn(text)
    if home is not None:
        folders = [job.run_folder for job in asked]
        done = [job.run_folder for job in asked if job.name not in failed]
        write_experiment(home, folders, done, "last", "all", warn)
    return Comparison(results, failed, home)


def _named(methods: Iterable[str | Method] | Mapping[str, str | Method]) -> dict[str, Method]:
    """Return methods by the names of their rows."""

    def made(method: str | Method) -> Method:
        return make_algorithm({"name": method}, "methods") if isinstance(method, str) else method

    if isinstance(methods, Mapping):
        return {str(name): made(method) for name, method in methods.items()}
    listed = [made(method) for method in methods]
    names = [getattr(method, "name", repr(method)) for method in listed]
    experiments.require_distinct("methods", names, "{'small': fedslr.FedSLR(eta_g=1), 'large': fedslr.FedSLR()}")
    return dict(zip(names, listed, strict=True))


def _jobs(
    methods: Mapping[str, Method],
    federation: Federation | Callable[[int], Federation],
    model: str | nn.Module,
    seeds: Sequence[int],
    home: Path | None,
    track: Sequence[str],
    settings: Mapping[str, Any],
) -> list[PythonJob]:
    """Return a checked job for every method and seed."""
    data = {seed: federation(seed) if callable(federation) else federation for seed in seeds}
    made = []
    for name, method in methods.items():
        for seed in seeds:
            request = checked_request(method, data[seed], model, ProcessGroup(), **settings, seed=seed)
            folder = None if home is None else home / experiments.folder_name(f"{name}-seed{seed}")
            made.append(PythonJob(f"{name}-seed{seed}", name, replace(request, out=folder, track=track)))
    return made


def _run(
    jobs: Sequence[PythonJob], home: Path | None, workers: int, shown: bool, warn: Callable[[str], None]
) -> dict[str, str]:
    """Run all jobs; return the reasons of those that failed."""
    stop = Stop()
    with contextlib.ExitStack() as ending:
        if home is not None:
            ending.enter_context(lock(home))
            # Without a folder nothing could go on, so ctrl-C ends the comparison at once.
            ending.enter_context(stop_on_ctrl_c(stop, warn))
        display = ending.enter_context(ExperimentDisplay({job.name: job.rounds for job in jobs}, quiet=not shown))
        sent = packed(jobs) if workers > 1 else jobs
        outcomes = run_jobs(sent, workers, display.show, stop.__bool__, warn)
    if any(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt(f"stopped; finished rounds are in {home}: go on with resume=True")
    return {outcome.job: outcome.error for outcome in outcomes if outcome.error is not None}
