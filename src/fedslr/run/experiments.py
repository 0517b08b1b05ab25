"""Experiments: the runs of a comparison of methods or of a sweep over hyperparameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fedslr.core import schema
from fedslr.core.errors import FedslrError
from fedslr.core.schema import seed_range
from fedslr.engine.setup import require_optimizers
from fedslr.run import folders, recipes
from fedslr.run.jobs import Job
from fedslr.run.python_jobs import PythonJob
from fedslr.run.recipes import Recipe

MAX_REASONS = 5
"""Failed runs whose reasons are printed."""
SavedJob = Job | PythonJob


def comparison(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return a job for every method and seed. A method takes the recipe's hyperparameters for it, or its defaults."""
    chosen = [recipe.method(name) for name in methods]
    require_distinct("methods", [method.name for method in chosen], "fedslr,fedavg")
    for method in chosen:
        require_optimizers(recipe.settings, method)
    jobs = []
    for method, seed in itertools.product(chosen, seeds):
        name = f"{method.name}-seed{seed}"
        jobs.append(Job(name, replace(with_seed(recipe, seed), algorithm=method), out / folder_name(name)))
    return jobs


def sweep(recipe: Recipe, over: Mapping[str, Sequence[Any]], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return a job for every combination of the given values, with every seed."""
    paths = [recipe.locate(key) for key in over]
    for key, path in zip(over, paths, strict=True):
        if paths.count(path) > 1:
            raise FedslrError(f"{key}: {path} is given twice; leave one out")
        require_distinct(key, over[key], f"{key}=value,value")
    jobs = []
    for values in itertools.product(*over.values()):
        table = recipe.to_table()
        for path, value in zip(paths, values, strict=True):
            recipes.change(table, path, value)
        changed = replace(recipes.complete(table), fixed_split=recipe.fixed_split)
        require_optimizers(changed.settings, changed.algorithm)
        words = "-".join(f"{k.rpartition('.')[2]}={v}" for k, v in zip(over, values, strict=True))
        for seed in seeds:
            home = out / f"{folder_name(words)}-seed{seed}"
            jobs.append(Job(f"{words}-seed{seed}", with_seed(changed, seed), home))
    return jobs


def folder_name(words: str) -> str:
    return quote(words, safe="=,+ ")


def checked_seeds(seeds: Sequence[int]) -> Sequence[int]:
    """Refuse seeds that are no whole numbers, or are given twice."""
    require_distinct("seeds", seeds, "0,1,2")
    return [schema.check_value("seeds", seed, Annotated[int, seed_range]) for seed in seeds]


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Return the recipe with another seed; the split follows it unless the recipe fixed the split's own."""
    data = recipe.data if recipe.fixed_split else replace(recipe.data, seed=seed)
    return replace(recipe, settings=replace(recipe.settings, seed=seed), data=data)


def require_distinct(name: str, values: Sequence[Any], example: str) -> None:
    if not values or any(a == b for a, b in itertools.combinations(values, 2)):
        got = f"'{','.join(map(str, values))}'" if values else "no values"
        raise FedslrError(f"{name}: got {got}, expected one or more different values, such as {example}")


def require_fresh(jobs: Iterable[SavedJob], resume: bool) -> None:
    """Refuse, before anything is started, to overwrite existing runs or to resume them with other recipes."""
    there = [job for job in jobs if (job.run_folder / "config.toml").exists()]
    if there and not resume:
        home = there[0].run_folder.parent
        again = "go on with --resume (in Python, resume=True)"
        raise FedslrError(f"out: {home} already holds runs ({there[0].name}); {again}, or choose another")
    for job in there:
        folders.require_same_run(job.run_folder, job.config, folders.planner_of(job.algorithm, job.settings))


def require_no_run(home: Path) -> None:
    """Refuse the folder of a single run."""
    if (home / "config.toml").exists():
        raise FedslrError(f"out: {home} is the folder of a single run; choose another")


def failure_text(failed: Mapping[str, str], runs: int) -> str:
    """Return one line on runs that failed, given their reasons."""
    reasons = "; ".join(f"{job}: {error}" for job, error in list(failed.items())[:MAX_REASONS])
    more = f"; and {', '.join(list(failed)[MAX_REASONS:])}" if len(failed) > MAX_REASONS else ""
    return f"{len(failed)} of {runs} runs failed; {reasons}{more}"
