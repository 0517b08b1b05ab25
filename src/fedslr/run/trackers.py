"""Trackers of experiments: TensorBoard, MLflow, Weights & Biases.

A tracker receives the configuration, every round and the summary; no environment and no models. Its own configuration
(`MLFLOW_TRACKING_URI`, `WANDB_MODE`, …) says where it sends them and with which account; the run folder holds nothing
of that. A tracker that fails is left out of the rest of the run, with a warning.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from fedslr.core.errors import FedslrError, suggest
from fedslr.core.schema import flatten
from fedslr.storage.record import SCORE

PROJECT = "fedslr"


class TrackedRun(NamedTuple):
    """A run as trackers see it when it starts."""

    name: str
    recipe: str
    """The text of config.toml."""
    folder: Path | None

    @property
    def config(self) -> dict[str, Any]:
        return flatten(tomllib.loads(self.recipe))


class Tracker(Protocol):
    """A tracker. Its constructor imports its package."""

    def start(self, run: TrackedRun) -> None: ...

    def log(self, record: Mapping[str, Any]) -> None:
        """Receive one finished round, as metrics.jsonl has it."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Receive the summary, or None if the run stopped before it had one."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a record by the names that trackers show; clients and layers are summed up."""
    found: dict[str, float | None] = {
        "bytes/down": record.get("bytes_down"),
        "bytes/up": record.get("bytes_up"),
        "parameters/global": record.get("parameters_global"),
        "parameters/personal": fmean(own) if (own := record.get("parameters_personal")) else None,
        "seconds": record.get("seconds"),
        "lr": record.get("lr"),
        "rank": sum(ranks.values()) if (ranks := record.get("rank")) else None,
    }
    found |= {
        "/".join(key.rsplit("_", 1)): v for key, v in record.items() if SCORE.fullmatch(key) and isinstance(v, float)
    }
    found |= {f"diagnostics/{name}": value for name, value in (record.get("diagnostics") or {}).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir DIR`."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Callable[..., Any] = SummaryWriter

    def start(self, run: TrackedRun) -> None:
        if run.folder is None:
            raise FedslrError("tensorboard writes to the run folder; give one with out")
        home = run.folder / "tensorboard"
        for before in home.glob("events.out.tfevents.*"):
            # A resumed run logs all its rounds again.
            before.unlink()
        self.writer = self._writer(log_dir=str(home))
        self.writer.add_text("config", f"```toml\n{run.recipe}\n```")

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["round"])
        self.writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self.writer.add_text("summary", f"```json\n{json.dumps(summary, indent=2)}\n```")
        self.writer.close()


class MLflow:
    """A run of the experiment `fedslr` (or `MLFLOW_EXPERIMENT_NAME`), wherever `MLFLOW_TRACKING_URI` says."""

    def __init__(self) -> None:
        import mlflow

        self._mlflow = mlflow

    def start(self, run: TrackedRun) -> None:
        self.client = self._mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        home = self.client.create_experiment(name) if found is None else found.experiment_id
        self.run = self.client.create_run(home, run_name=run.name).info.run_id
        for key, value in run.config.items():
            self.client.log_param(self.run, key, value)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.client.log_metric(self.run, name, value, step=record["round"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self.client.log_dict(self.run, dict(summary), "summary.json")
        self.client.set_terminated(self.run, "FAILED" if summary is None else "FINISHED")


class WandB:
    """A run of the project `fedslr` (or `WANDB_PROJECT`); `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb

    def start(self, run: TrackedRun) -> None:
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self.run = self._wandb.init(project=project, name=run.name, config=run.config, reinit="finish_previous")

    def log(self, record: Mapping[str, Any]) -> None:
        self.run.log(scalars(record), step=record["round"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.run.summary.update({} if summary is None else dict(summary))
        self.run.finish(exit_code=int(summary is None))


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def make(name: str) -> Tracker:
    """Return a tracker by name; refuse one whose package is not installed."""
    if name not in TRACKERS:
        raise FedslrError(f"track: got '{name}', no such tracker; {suggest(name, TRACKERS)}")
    try:
        return TRACKERS[name]()
    except ImportError:
        raise FedslrError(f"track: {name} is not installed; pip install 'fedslr[track]'") from None


class Tracking:
    """The trackers of one run. A failure of theirs does not stop the run."""

    def __init__(self, names: Sequence[str], warn: Callable[[str], None]) -> None:
        self.made = {name: make(name) for name in names}
        self.started: dict[str, Tracker] = {}
        self.warn = warn

    def start(self, run: TrackedRun, earlier: Sequence[Mapping[str, Any]]) -> None:
        """Start the trackers, and log the rounds that a resumed run already has."""
        self.started = dict(self.made)
        self._each(lambda tracker: tracker.start(run))
        for record in earlier:
            self.log(record)

    def log(self, record: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(record))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Finish the trackers; a second call does nothing."""
        self._each(lambda tracker: tracker.finish(summary))
        self.started = {}

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.started.items()):
            try:
                do(tracker)
            except Exception as error:
                del self.started[name]
                why = " ".join(str(error).split()) or type(error).__name__
                self.warn(f"track: {name} failed and is left out: {why}")
