"""Runs that were asked for in Python, as jobs of an experiment."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.group import Group
from fedslr.engine.settings import Settings
from fedslr.run.execution import RunRequest, execute
from fedslr.run.reopen import open_run
from fedslr.run.result import Result


class PythonJob:
    """One run of a comparison; `method` is the name of its row."""

    def __init__(self, name: str, method: str, request: RunRequest) -> None:
        self.name, self.method, self.request = name, method, request
        self._result: Result | None = None

    @property
    def run_folder(self) -> Path:
        """The folder of a job that has one."""
        assert self.request.out is not None
        return self.request.out

    @property
    def settings(self) -> Settings:
        return self.request.settings

    @property
    def rounds(self) -> int:
        return self.settings.rounds

    @property
    def config(self) -> str:
        return self.request.config

    @property
    def algorithm(self) -> Algorithm[Any, Any, Any]:
        return self.request.algorithm

    def run(self, **hooks: Any) -> None:
        """Train, or go on with the run in the folder."""
        folder = self.request.out
        found = execute(replace(self.request, resume=folder is not None and folder.exists(), **hooks), Group())
        if folder is None:
            self._result = found

    def result(self) -> Result:
        """Return the result of the run. If it has a folder, client states are read from there when they are needed."""
        asked = self.request
        return self._result or open_run(
            self.run_folder,
            asked.federation,
            asked.model if isinstance(asked.model, nn.Module) else None,
            algorithm=asked.algorithm,
            device=asked.settings.device,
            loss=asked.loss,
        )


class PackedJob(NamedTuple):
    """A job for another process. Tensors are sent by value: shared memory would take an open file for each."""

    name: str
    rounds: int
    request: bytes
    """The fields of the request except the federation."""
    federation: bytes

    def run(self, **hooks: Any) -> None:
        try:
            request = RunRequest(federation=pickle.loads(self.federation), **pickle.loads(self.request))
        except (AttributeError, ImportError) as error:
            raise FedslrError(f"{NOT_SENT}: {error}; {ADVICE}") from error
        PythonJob(self.name, "", request).run(**hooks)


NOT_SENT = "jobs: another process cannot load your classes or functions"
ADVICE = "put them in a module that you import, or leave jobs out"


def packed(jobs: Sequence[PythonJob]) -> list[PackedJob]:
    """Return jobs as other processes receive them; jobs with the same federation share its bytes."""
    try:
        data = {id(job.request.federation): job.request.federation for job in jobs}
        data_bytes = {key: pickle.dumps(federation) for key, federation in data.items()}
        return [
            PackedJob(job.name, job.rounds, pickle.dumps(_fields(job.request)), data_bytes[id(job.request.federation)])
            for job in jobs
        ]
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise FedslrError(f"{NOT_SENT}: {error}; {ADVICE}") from error


def _fields(request: RunRequest) -> dict[str, Any]:
    return {f.name: getattr(request, f.name) for f in fields(request) if f.name != "federation"}
