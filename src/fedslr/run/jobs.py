"""Jobs, the runs of an experiment: one after the other, or several at once in worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fedslr.core import plugins
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, Interrupted, show_traceback
from fedslr.core.interrupts import STOP_SIGNALS
from fedslr.core.machine import cores, machine_failure
from fedslr.data import decode_to_cache
from fedslr.engine.settings import Settings
from fedslr.run import api
from fedslr.run.progress import JobProgress
from fedslr.run.recipes import Recipe
from fedslr.storage.record import Record


class AnyJob(Protocol):
    """One run of an experiment."""

    @property
    def name(self) -> str: ...

    @property
    def rounds(self) -> int: ...

    def run(self, **hooks: Any) -> None:
        """Train, or go on with the run in the folder; `hooks` are fields of `RunRequest`."""


class Job(NamedTuple):
    """A job that a recipe describes."""

    name: str
    recipe: Recipe
    folder: Path
    track: tuple[str, ...] = ()

    @property
    def run_folder(self) -> Path:
        return self.folder

    @property
    def settings(self) -> Settings:
        return self.recipe.settings

    @property
    def rounds(self) -> int:
        return self.settings.rounds

    @property
    def config(self) -> str:
        return api.resolved(self.recipe).to_toml()

    @property
    def algorithm(self) -> Algorithm[Any, Any, Any]:
        return self.recipe.algorithm

    def run(self, **hooks: Any) -> None:
        api.run_recipe(self.recipe, self.folder, resume=self.folder.exists(), track=self.track, **hooks)


class JobWarning(NamedTuple):
    """A warning of a running job."""

    job: str
    text: str


class JobOutcome(NamedTuple):
    """The end of a job; without an error, it is done or was interrupted."""

    job: str
    error: str | None = None
    interrupted: bool = False


Notify = Callable[[JobProgress | JobWarning], None]


def run_job(job: AnyJob, notify: Notify, should_stop: Callable[[], bool]) -> JobOutcome:
    """Run one job, or the rounds that are left of it."""

    def on_round(record: Record) -> None:
        notify(JobProgress(job.name, record.round, record.scores_text()))

    try:
        job.run(on_round=on_round, should_stop=should_stop, warn=lambda text: notify(JobWarning(job.name, text)))
    except Interrupted:
        return JobOutcome(job.name, interrupted=True)
    except Exception as error:
        show_traceback(error)
        return JobOutcome(job.name, error_line(error) or f"{type(error).__name__}: {' '.join(str(error).split())}")
    return JobOutcome(job.name)


def error_line(error: Exception) -> str | None:
    """Return one line for a wrong request, a failure of the machine or of the user's own code; None for a defect."""
    if isinstance(error, FedslrError):
        return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", []))])
    return machine_failure(error) or plugins.own_mistake(error)


def run_jobs(
    jobs: Sequence[AnyJob],
    workers: int,
    on_progress: Callable[[JobProgress], None],
    should_stop: Callable[[], bool],
    warn: Callable[[str], None],
) -> list[JobOutcome]:
    """Run the jobs that are not yet done. A job that fails does not stop the others. A warning is passed on once."""
    warned: set[str] = set()

    def notify(message: JobProgress | JobWarning) -> None:
        if isinstance(message, JobProgress):
            on_progress(message)
        elif message.text not in warned:
            warned.add(message.text)
            warn(f"{message.job}: {message.text}")

    if workers > 1 and len(jobs) > 1:
        options = [job.recipe.data for job in jobs if isinstance(job, Job)]
        for data in {(data.name, data.root): data for data in options}.values():
            with contextlib.suppress(FedslrError):  # The jobs report it.
                decode_to_cache(data)
        return _run_in_workers(jobs, min(workers, len(jobs)), notify, should_stop)
    outcomes: list[JobOutcome] = []
    for job in jobs:
        outcomes.append(run_job(job, notify, should_stop))
        if outcomes[-1].interrupted:
            break
    return outcomes


_messages: Any = None
_stop: Any = None


def _start_worker(messages: Any, stop: Any, threads: int, parent: int) -> None:
    """Make a worker share the cores, send its progress through a queue, and end with its parent."""
    global _messages, _stop
    _messages, _stop = messages, stop
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """End this worker once its parent was killed. Finished rounds are on the disk, so nothing is lost."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(job: AnyJob) -> JobOutcome:
    return JobOutcome(job.name, interrupted=True) if _stop.is_set() else run_job(job, _messages.put, _stop.is_set)


def _run_in_workers(
    jobs: Sequence[AnyJob], workers: int, notify: Notify, should_stop: Callable[[], bool]
) -> list[JobOutcome]:
    """Run jobs in processes of their own, several at once."""
    # Forking a process that has used torch's threads can deadlock.
    context = multiprocessing.get_context("spawn")
    messages, stop = context.Queue(), context.Event()
    threads = max(1, cores() // workers)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (messages, stop, threads, os.getpid()))
    # Ctrl-C and a launcher's SIGTERM reach the whole process group. Workers inherit the block, so that only the parent
    # answers; a signal that comes while they start waits for its end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        futures = [pool.submit(_work, job) for job in jobs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while not all(f.done() for f in futures):
            if should_stop():
                stop.set()
            _pass_on(messages, notify)
        _pass_on(messages, notify)
        if any(isinstance(f.exception(), BrokenProcessPool) for f in futures):
            # A pool that lost a worker ends the others with SIGTERM, which they block, and waits for them.
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


def _pass_on(messages: Any, notify: Notify) -> None:
    """Pass on the workers' messages, at most 1,000 of them, so that a request to stop is noticed."""
    with contextlib.suppress(queue.Empty):
        notify(messages.get(timeout=0.1))
        for _ in range(1000):
            notify(messages.get_nowait())


def _outcome(job: AnyJob, future: Future[JobOutcome]) -> JobOutcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return JobOutcome(job.name, "a worker was killed (out of memory?); go on with --resume")
