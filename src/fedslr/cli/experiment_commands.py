"""`fedslr compare`, `sweep` and `demo`: the commands that make several runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fedslr.algorithms import ALGORITHMS
from fedslr.cli.arguments import (
    Changes,
    Clients,
    Pick,
    RecipeName,
    Resume,
    Track,
    check_accuracy,
    default_folder,
    placed,
    split_words,
)
from fedslr.cli.display import Decoding, out_console, warn
from fedslr.cli.printing import print_table
from fedslr.core.errors import FedslrError, Interrupted
from fedslr.core.interrupts import stop_on_signal
from fedslr.core.machine import cores
from fedslr.data.image_decoding import decoding_progress
from fedslr.engine import distributed
from fedslr.report.experiment_files import write_experiment
from fedslr.run import experiments, recipes, trackers
from fedslr.run.jobs import Job, run_jobs
from fedslr.run.progress import ExperimentDisplay
from fedslr.run.recipe_library import find_recipe
from fedslr.run.recipe_text import paths_of
from fedslr.storage.locks import lock

Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for the runs. Default: runs/RECIPE.")]
Seeds = Annotated[str | None, typer.Option(metavar="SEED,…", help="Seeds, separated by commas.")]
Workers = Annotated[
    int | None,
    typer.Option("--jobs", min=1, metavar="NUMBER", help="Runs at once. Default: one per core, one on a GPU."),
]


def compare(
    recipe: RecipeName,
    methods: Annotated[
        str | None,
        typer.Option(metavar="METHOD,…", help="Methods, separated by commas, or `all`. Default: those of the recipe."),
    ] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    out: Out = None,
    resume: Resume = False,
    workers: Workers = None,
    pick: Pick = "last",
    clients: Clients = "all",
    track: Track = None,
) -> None:
    """Run several methods and put them in one table.

    All methods have identical splits, starting points and cohorts. The recipe's table `compare` may name the methods
    and the seeds.
    """
    path = find_recipe(recipe)
    request = recipes.read(path, changes or [])
    names = split_words(methods) if methods is not None else list(request.compare.methods)
    names = list(ALGORITHMS) if names == ["all"] else names
    home, own = out or default_folder(path), type(request.algorithm)
    chosen = _seeds(seeds, request, path)
    with placed("--" if methods is not None else f"{path}: compare."):
        jobs = experiments.comparison(request, names, chosen, home)
    paths = {c: paths_of(c.partition("=")[0].strip(), own) for c in changes or []}
    unused = next((c for c, found in paths.items() if any(path.startswith("algorithm.") for path in found)), None)
    if unused is not None and not any(type(job.recipe.algorithm) is own for job in jobs):
        warn(
            f"--set {unused}: {request.algorithm.name} is not compared; set the hyperparameters of a compared method "
            "with --set methods.NAME.KEY=VALUE"
        )
    _run_experiment(jobs, home, resume, workers, pick, clients, track or [])


def sweep(
    recipe: RecipeName,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,…", help="Values of a key of the recipe, such as lr=0.1,0.01. Repeatable."),
    ] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    out: Out = None,
    resume: Resume = False,
    workers: Workers = None,
    pick: Pick = "last",
    clients: Clients = "all",
    track: Track = None,
) -> None:
    """Run a recipe with every combination of some values.

    The runs are put in one table. The recipe's table `sweep` may name the keys and the values.
    """
    path = find_recipe(recipe)
    request = recipes.read(path, changes or [])
    values: dict[str, list[Any]] = {}
    for key, some in map(_axis, over or []):
        values.setdefault(key, []).extend(some)
    if not values and not request.sweep:
        raise FedslrError("--over: got none, expected one or more keys with values, such as --over lr=0.1,0.01")
    home, chosen = out or default_folder(path), _seeds(seeds, request, path)
    with placed("--over " if values else f"{path}: sweep."):
        jobs = experiments.sweep(request, values or request.sweep, chosen, home)
    _run_experiment(jobs, home, resume, workers, pick, clients, track or [])


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the runs.")] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again what is there, instead of showing it.")] = False,
    workers: Workers = None,
) -> None:
    """Compare six methods on handwritten digits.

    A second demo shows the finished runs, and goes on with those that were stopped.
    """
    if fresh:
        with lock(out):
            for config in out.glob("*-seed*/config.toml"):
                shutil.rmtree(config.parent)
    compare("demo", out=out, resume=True, workers=workers)


def _seeds(text: str | None, request: recipes.Recipe, path: Path) -> Sequence[int]:
    """Return the seeds that were given, or those of the recipe."""
    if text is None:
        with placed(f"{path}: compare."):
            return experiments.checked_seeds(request.compare.seeds or [request.settings.seed])
    with placed("--"):
        return experiments.checked_seeds([recipes.value_of(word) for word in split_words(text)])


def _axis(text: str) -> tuple[str, list[Any]]:
    """Return the key and the values of `key=value,value`."""
    key, _, values = text.partition("=")
    listed = recipes.value_of(f"[{values}]")
    return key.strip(), listed if isinstance(listed, list) else [recipes.value_of(word) for word in split_words(values)]


def _run_experiment(
    jobs: list[Job], home: Path, resume: bool, workers: int | None, pick: str, clients: str, track: list[str]
) -> None:
    """Run the jobs, then print and write their table."""
    # A GPU is shared by the runs, so they follow one another.
    workers = workers or (1 if torch.cuda.is_available() else cores())
    if distributed.several():
        raise FedslrError("torchrun: several processes work on one run (fedslr run); several runs are --jobs' work")
    check_accuracy(pick, clients)
    for name in track:
        trackers.make(name)
    jobs = [job._replace(track=tuple(track)) for job in jobs]
    experiments.require_fresh(jobs, resume)
    experiments.require_no_run(home)
    with (
        lock(home),
        ExperimentDisplay({job.name: job.rounds for job in jobs}) as display,
        decoding_progress(Decoding(display.progress)),
        stop_on_signal(warn) as stopped,
    ):
        outcomes = run_jobs(jobs, workers, display.show, stopped.__bool__, warn)
    if any(o.interrupted for o in outcomes):
        raise Interrupted(f"stopped; finished rounds are in {home}: go on with the same command and --resume")
    done = [job.folder for job, o in zip(jobs, outcomes, strict=True) if o.error is None]
    if done:
        table, others = write_experiment(home, [job.folder for job in jobs], done, pick, clients, warn)
        print_table(table)
        if others:
            names = ", ".join(p.name for p in others)
            out_console.print(f"the table also has runs of earlier commands in this folder: {names}", soft_wrap=True)
        written = "report.html, table.md, table.csv, table.tex, accuracy.png"
        out_console.print(f"results in {home} ({written})", soft_wrap=True)
    if failed := {o.job: o.error for o in outcomes if o.error is not None}:
        raise FedslrError(experiments.failure_text(failed, len(outcomes)))
