"""Jobs: the runs of an experiment, each with a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedslr.core import plugins
from fedslr.core.errors import FedslrError, Interrupted, show_traceback
from fedslr.core.machine import machine_failure
from fedslr.run import api
from fedslr.run.recipes import Recipe
from fedslr.storage.record import Record


class Job(NamedTuple):
    """One run of an experiment."""

    name: str
    recipe: Recipe
    folder: Path
    track: tuple[str, ...] = ()


class JobProgress(NamedTuple):
    """A finished round of a running job."""

    job: str
    round: int
    accuracy_global: float | None
    accuracy_personal: float | None


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


def run_job(job: Job, notify: Notify, should_stop: Callable[[], bool]) -> JobOutcome:
    """Run one job, or what is left of it."""

    def on_round(record: Record) -> None:
        notify(JobProgress(job.name, record.round, record.accuracy_global, record.accuracy_personal))

    try:
        api.run_recipe(
            job.recipe,
            job.folder,
            resume=job.folder.exists(),
            on_round=on_round,
            should_stop=should_stop,
            warn=lambda text: notify(JobWarning(job.name, text)),
            track=job.track,
        )
    except Interrupted:
        return JobOutcome(job.name, interrupted=True)
    except Exception as error:
        show_traceback(error)
        return JobOutcome(job.name, error_line(error) or f"{type(error).__name__}: {' '.join(str(error).split())}")
    return JobOutcome(job.name)


def error_line(error: Exception) -> str | None:
    """Return one line for a wrong request, a failure of the machine or of a person's own code; None for a defect."""
    return str(error) if isinstance(error, FedslrError) else machine_failure(error) or plugins.own_mistake(error)
