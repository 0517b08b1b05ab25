"""Many runs as one job: a comparison of methods, a sweep over hyperparameters. Resumable as a whole.

Every run has a folder of its own, as if `fedslr run` had made it; runs of one seed share split, start and cohorts.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedslr import api, config
from fedslr.algorithms import ALGORITHMS
from fedslr.config import Recipe
from fedslr.data import share_out
from fedslr.errors import FedslrError, Interrupted, suggest
from fedslr.record import Record


class Job(NamedTuple):
    """One run of an experiment."""

    name: str
    recipe: Recipe
    folder: Path


class Progress(NamedTuple):
    """What a running job says after a round."""

    job: str
    round: int
    accuracy_global: float | None
    accuracy_personal: float | None


class Outcome(NamedTuple):
    """How a job ended: nothing to say if it is done."""

    job: str
    error: str | None = None
    interrupted: bool = False


# --- which runs -----------------------------------------------------------------------------------------------------


def comparison(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], out: Path) -> list[Job]:
    """Every method with every seed. A method takes the hyperparameters the recipe has for it, or its defaults."""
    for name in methods:
        if name not in ALGORITHMS:
            raise FedslrError(f"methods: got '{name}', no such method; {suggest(name, ALGORITHMS)}")
    _require_different("methods", methods)
    jobs = []
    for name, seed in itertools.product(methods, checked_seeds(seeds)):
        changed = replace(with_seed(recipe, seed), algorithm=recipe.method(name))
        jobs.append(Job(f"{name}-seed{seed}", changed, out / f"{name}-seed{seed}"))
    return jobs


def sweep(recipe: Recipe, over: Mapping[str, Sequence[Any]], seeds: Sequence[int], out: Path) -> list[Job]:
    """Every combination of the given values, with every seed."""
    if not over:
        raise FedslrError("sweep: nothing to sweep over; give --over key=value,value or a [sweep] table in the recipe")
    paths = {key: recipe.locate(key) for key in over}
    for key, values in over.items():
        _require_different(f"sweep.{key}", [str(v) for v in values])
    jobs = []
    for values in itertools.product(*over.values()):
        table = recipe.to_table()
        for path, value in zip(paths.values(), values, strict=True):
            config.set_path(table, path, value)
        changed = config.parse(table)
        words = "-".join(f"{k.rpartition('.')[2]}={v}" for k, v in zip(over, values, strict=True))
        for seed in checked_seeds(seeds):
            name = f"{words}-seed{seed}"
            jobs.append(Job(name, with_seed(changed, seed), out / name.replace("/", "_")))
    return jobs


def checked_seeds(seeds: Sequence[int]) -> Sequence[int]:
    _require_different("seeds", [str(s) for s in seeds])
    return seeds


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with another seed; the split follows it unless the recipe fixed the split's own."""
    data = recipe.data if recipe.data.seed != recipe.settings.seed else replace(recipe.data, seed=seed)
    return replace(recipe, settings=replace(recipe.settings, seed=seed), data=data)


def _require_different(what: str, values: Sequence[str]) -> None:
    if not values:
        raise FedslrError(f"{what}: got none, expected at least one")
    if len(set(values)) < len(values):
        raise FedslrError(f"{what}: got '{','.join(values)}', expected each one once")


# --- running them ---------------------------------------------------------------------------------------------------


def require_fresh(jobs: Iterable[Job], resume: bool) -> None:
    """Refuse to start over runs that are there, before anything is started."""
    there = [job for job in jobs if (job.folder / "config.toml").exists()]
    if there and not resume:
        home = there[0].folder.parent
        raise FedslrError(f"out: {home} already holds runs ({there[0].name}); go on with --resume, or choose another")


def execute(
    jobs: Sequence[Job],
    workers: int,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> list[Outcome]:
    """Run what is not yet done, several at once. A run that fails does not stop the others."""
    if workers <= 1 or len(jobs) == 1:
        outcomes = []
        for job in jobs:
            outcomes.append(_run(job, on_progress, should_stop))
            if outcomes[-1].interrupted:
                break
        return outcomes
    return _execute_in_parallel(jobs, min(workers, len(jobs)), on_progress, should_stop)


def default_workers() -> int:
    """As many as there are cores; one where a GPU is shared."""
    return 1 if torch.cuda.is_available() else max(1, len(os.sched_getaffinity(0)))


def _run(job: Job, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]) -> Outcome:
    def told(record: Record) -> None:
        on_progress(Progress(job.name, record.round, record.accuracy_global, record.accuracy_personal))

    try:
        api.run(
            job.recipe.algorithm,
            share_out(job.recipe.data),
            job.recipe.model.name,
            out=job.folder,
            resume=job.folder.exists(),
            on_round=told,
            should_stop=should_stop,
            warn=lambda text: None,
            config=job.recipe.to_toml(),
            **asdict(job.recipe.settings),
        )
        return Outcome(job.name)
    except Interrupted:
        return Outcome(job.name, interrupted=True)
    except FedslrError as error:
        return Outcome(job.name, str(error))


_messages: Any = None
_stop: Any = None


def _start_worker(messages: Any, stop: Any, threads: int) -> None:
    """A worker shares the cores, tells its progress through a queue, and leaves ctrl-C to its parent."""
    global _messages, _stop
    _messages, _stop = messages, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _work(job: Job) -> Outcome:
    if _stop.is_set():
        return Outcome(job.name, interrupted=True)
    return _run(job, _messages.put, _stop.is_set)


def _execute_in_parallel(
    jobs: Sequence[Job], workers: int, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]
) -> list[Outcome]:
    # Forking a process that has used torch's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    messages, stop = context.Queue(), context.Event()
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    with ProcessPoolExecutor(workers, context, _start_worker, (messages, stop, threads)) as pool:
        futures: list[Future[Outcome]] = [pool.submit(_work, job) for job in jobs]
        while not all(f.done() for f in futures):
            if should_stop():
                stop.set()
            try:
                on_progress(messages.get(timeout=0.1))
            except queue.Empty:
                continue
        while True:
            try:
                on_progress(messages.get(timeout=0.05))
            except queue.Empty:
                break
    return [f.result() for f in futures]
