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
from fedslr.run import folders, recipes
from fedslr.run.api import resolved
from fedslr.run.jobs import Job
from fedslr.run.recipes import Recipe


def comparison(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return a job for every method and seed. A method takes the recipe's hyperparameters for it, or its defaults."""
    chosen = [recipe.method(name) for name in methods]
    _require_distinct("methods", [method.name for method in chosen], "fedslr,fedavg")
    jobs = []
    for method, seed in itertools.product(chosen, seeds):
        name = f"{method.name}-seed{seed}"
        jobs.append(Job(name, replace(with_seed(recipe, seed), algorithm=method), out / _folder_name(name)))
    return jobs


def sweep(recipe: Recipe, over: Mapping[str, Sequence[Any]], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return a job for every combination of the given values, with every seed."""
    paths = [recipe.locate(key) for key in over]
    for key, path in zip(over, paths, strict=True):
        if paths.count(path) > 1:
            raise FedslrError(f"{key}: {path} is given twice; leave one out")
        _require_distinct(key, over[key], f"{key}=value,value")
    jobs = []
    for values in itertools.product(*over.values()):
        table = recipe.to_table()
        for path, value in zip(paths, values, strict=True):
            recipes.change(table, path, value)
        changed = replace(recipes.complete(table), fixed_split=recipe.fixed_split)
        words = "-".join(f"{k.rpartition('.')[2]}={v}" for k, v in zip(over, values, strict=True))
        for seed in seeds:
            home = out / f"{_folder_name(words)}-seed{seed}"
            jobs.append(Job(f"{words}-seed{seed}", with_seed(changed, seed), home))
    return jobs


def _folder_name(words: str) -> str:
    return quote(words, safe="=,+ ")


def checked_seeds(seeds: Sequence[int]) -> Sequence[int]:
    """Refuse seeds that are no whole numbers, or are given twice."""
    _require_distinct("seeds", seeds, "0,1,2")
    return [schema.check_value("seeds", seed, Annotated[int, seed_range]) for seed in seeds]


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """Return the recipe with another seed; the split follows it unless the recipe fixed the split's own."""
    data = recipe.data if recipe.fixed_split else replace(recipe.data, seed=seed)
    return replace(recipe, settings=replace(recipe.settings, seed=seed), data=data)


def _require_distinct(name: str, values: Sequence[Any], example: str) -> None:
    if not values or any(a == b for a, b in itertools.combinations(values, 2)):
        got = f"'{','.join(map(str, values))}'" if values else "none"
        raise FedslrError(f"{name}: got {got}, expected one or more, each only once, such as {example}")


def require_fresh(jobs: Iterable[Job], resume: bool) -> None:
    """Refuse, before anything is started, to overwrite existing runs or to resume them with other recipes."""
    there = [job for job in jobs if (job.folder / "config.toml").exists()]
    if there and not resume:
        home = there[0].folder.parent
        raise FedslrError(f"out: {home} already holds runs ({there[0].name}); go on with --resume, or choose another")
    for job in there:
        config = resolved(job.recipe).to_toml()
        folders.require_same_run(job.folder, config, job.recipe.algorithm)
