"""Many runs as one job: a comparison of methods, a sweep over hyperparameters. Resumable as a whole.

Every run has a folder of its own, as if `fedslr run` had made it; runs of one seed share split, start and cohorts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import torch

from fedslr.core import plugins, schema
from fedslr.core.errors import FedslrError, Interrupted, show_traceback
from fedslr.core.failures import failure
from fedslr.core.interrupts import ASKS
from fedslr.core.machine import cores
from fedslr.core.schema import seed_range
from fedslr.data import prepare
from fedslr.run import api, folders, recipes
from fedslr.run.recipes import Recipe
from fedslr.storage.record import Record

LONGEST = 230
"""Characters of a folder's name that say what a run is; file systems take 255, with the seed and all."""


class Job(NamedTuple):
    """One run of an experiment."""

    name: str
    recipe: Recipe
    folder: Path
    track: tuple[str, ...] = ()


class Progress(NamedTuple):
    """What a running job says after a round."""

    job: str
    round: int
    accuracy_global: float | None
    accuracy_personal: float | None


class Told(NamedTuple):
    """What a running job warns of."""

    job: str
    text: str


class Outcome(NamedTuple):
    """How a job ended: nothing to say if it is done."""

    job: str
    error: str | None = None
    interrupted: bool = False


# --- which runs -----------------------------------------------------------------------------------------------------


def comparison(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], out: Path) -> list[Job]:
    """Every method with every seed. A method takes the hyperparameters the recipe has for it, or its defaults."""
    _require_different("methods", methods)
    chosen = [recipe.method(name) for name in methods]
    for (a, one), (b, other) in itertools.combinations(zip(methods, chosen, strict=True), 2):
        if one.name == other.name:
            raise FedslrError(f"methods: '{a}' and '{b}' are both called '{one.name}'; give one another name")
    jobs = []
    for method, seed in itertools.product(chosen, checked_seeds(seeds)):
        name = f"{method.name}-seed{seed}"
        jobs.append(Job(name, replace(with_seed(recipe, seed), algorithm=method), out / _as_name(name)))
    return jobs


def sweep(recipe: Recipe, over: Mapping[str, Sequence[Any]], seeds: Sequence[int], out: Path) -> list[Job]:
    """Every combination of the given values, with every seed."""
    if not over:
        raise FedslrError("sweep: nothing to sweep over; give --over key=value,value or a [sweep] table in the recipe")
    paths = {key: recipe.locate(key) for key in over}
    _require_different("sweep", list(paths.values()))
    for key, values in over.items():
        _require_different(f"sweep.{key}", values)
    jobs = []
    for values in itertools.product(*over.values()):
        table = recipe.to_table()
        for path, value in zip(paths.values(), values, strict=True):
            recipes.change(table, path, value)
        changed = replace(recipes.complete(table), fixed_split=recipe.fixed_split)
        words = "-".join(f"{k.rpartition('.')[2]}={v}" for k, v in zip(over, values, strict=True))
        for seed in checked_seeds(seeds):
            home = out / f"{_as_name(words)}-seed{seed}"
            jobs.append(Job(f"{words}-seed{seed}", with_seed(changed, seed), home))
    return jobs


def _as_name(words: str) -> str:
    """Words as part of a folder's name: long ones are cut, and told apart from others by a digest of all of them."""
    name = quote(words, safe="=,+ ")
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 13]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def checked_seeds(seeds: Sequence[int]) -> Sequence[int]:
    _require_different("seeds", seeds)
    return [schema.check_value("seeds", seed, Annotated[int, seed_range]) for seed in seeds]


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with another seed; the split follows it unless the recipe fixed the split's own."""
    data = recipe.data if recipe.fixed_split else replace(recipe.data, seed=seed)
    return replace(recipe, settings=replace(recipe.settings, seed=seed), data=data)


def _require_different(what: str, values: Sequence[Any]) -> None:
    if not values:
        raise FedslrError(f"{what}: got none, expected at least one")
    if any(a == b for a, b in itertools.combinations(values, 2)):
        raise FedslrError(f"{what}: got '{','.join(map(str, values))}', expected each one once")


# --- running them ---------------------------------------------------------------------------------------------------


def require_fresh(jobs: Iterable[Job], resume: bool) -> None:
    """Refuse to start over runs that are there, or to go on with others, before anything is started."""
    there = [job for job in jobs if (job.folder / "config.toml").exists()]
    if there and not resume:
        home = there[0].folder.parent
        raise FedslrError(f"out: {home} already holds runs ({there[0].name}); go on with --resume, or choose another")
    for job in there:
        if found := folders.changed(job.folder, job.recipe):
            raise FedslrError(
                f"resume: {job.folder} is another run: {found}; go on with what it was begun with, choose another "
                "folder, or delete that one"
            )


def execute(
    jobs: Sequence[Job],
    workers: int,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    warn: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Run what is not yet done, several at once. A run that fails does not stop the others.

    What several runs warn of is said once.
    """
    said: set[str] = set()

    def tell(message: Progress | Told) -> None:
        if isinstance(message, Progress):
            on_progress(message)
        elif message.text not in said:
            said.add(message.text)
            warn(f"{message.job}: {message.text}")

    if workers <= 1 or len(jobs) == 1:
        outcomes = []
        for job in jobs:
            outcomes.append(_run(job, tell, should_stop))
            if outcomes[-1].interrupted:
                break
        return outcomes
    for options in {(job.recipe.data.name, job.recipe.data.root): job.recipe.data for job in jobs}.values():
        with contextlib.suppress(FedslrError):  # the runs will say what is wrong
            prepare(options)
    return _execute_in_parallel(jobs, min(workers, len(jobs)), tell, should_stop)


def default_workers() -> int:
    """As many as there are cores; one where a GPU is shared."""
    return 1 if torch.cuda.is_available() else cores()


Tell = Callable[[Progress | Told], None]


def _run(job: Job, tell: Tell, should_stop: Callable[[], bool]) -> Outcome:
    def told(record: Record) -> None:
        tell(Progress(job.name, record.round, record.accuracy_global, record.accuracy_personal))

    try:
        api.run_recipe(
            job.recipe,
            job.folder,
            resume=job.folder.exists(),
            on_round=told,
            should_stop=should_stop,
            warn=lambda text: tell(Told(job.name, text)),
            track=job.track,
        )
        return Outcome(job.name)
    except Interrupted:
        return Outcome(job.name, interrupted=True)
    except FedslrError as error:
        show_traceback(error)
        return Outcome(job.name, str(error))
    except Exception as error:
        show_traceback(error)
        plain = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(job.name, failure(error) or plugins.own_mistake(error) or plain)


_messages: Any = None
_stop: Any = None


def _start_worker(messages: Any, stop: Any, threads: int, parent: int) -> None:
    """A worker shares the cores, tells its progress through a queue, and does not outlive its parent."""
    global _messages, _stop
    _messages, _stop = messages, stop
    for number in ASKS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """A parent that was killed cannot say so; finished rounds are on the disk, so leaving at once loses nothing."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(job: Job) -> Outcome:
    if _stop.is_set():
        return Outcome(job.name, interrupted=True)
    return _run(job, _messages.put, _stop.is_set)


def _execute_in_parallel(
    jobs: Sequence[Job], workers: int, tell: Tell, should_stop: Callable[[], bool]
) -> list[Outcome]:
    # Forking a process that has used torch's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    messages, stop = context.Queue(), context.Event()
    threads = max(1, cores() // workers)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (messages, stop, threads, os.getpid()))
    # Ctrl-C and a launcher's SIGTERM reach the whole process group; workers inherit that the parent answers them.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ASKS}
    try:
        futures = [pool.submit(_work, job) for job in jobs]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        while not all(f.done() for f in futures):
            if should_stop():
                stop.set()
            _drain(messages, tell, 0.1)
        _drain(messages, tell, 0.1)
        if any(isinstance(f.exception(), BrokenProcessPool) for f in futures):
            # A pool that lost a worker ends the others with SIGTERM, which they leave to us, and waits for them.
            _kill_workers()
    except BaseException:
        _kill_workers()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [_outcome(job, future) for job, future in zip(jobs, futures, strict=True)]


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _drain(messages: Any, tell: Tell, seconds: float) -> None:
    """Pass on what has been said, waiting a little for the first word; fast workers must not keep us here for ever."""
    try:
        tell(messages.get(timeout=seconds))
        for _ in range(1000):
            tell(messages.get_nowait())
    except queue.Empty:
        return


def _outcome(job: Job, future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return Outcome(job.name, "a worker was killed (out of memory?); go on with --resume")
