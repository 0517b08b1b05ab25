"""Learning tasks: losses, metrics and predictions for a kind of target."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedslr.core.errors import FedslrError
from fedslr.tasks.losses import LOSSES
from fedslr.tasks.metrics import METRICS


class Task(NamedTuple):
    """A task."""

    name: str
    losses: tuple[str, ...]
    """The losses that suit the task; the first is the default."""
    metrics: tuple[str, ...]
    """The metrics of the task; the first is the default headline."""
    default_metrics: int = 1
    """How many of the metrics are measured unless others are asked for."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return probabilities, or for regression the outputs themselves."""
        if self.name == "regression":
            return outputs
        return torch.sigmoid(outputs) if self.losses == ("bce",) else torch.softmax(outputs, -1)


_RANKED = ("auroc", "average_precision")
TASKS = {
    task.name: task
    for task in (
        Task(
            "classification",
            ("cross_entropy",),
            ("accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1", *_RANKED, "log_loss", "ece"),
        ),
        Task(
            "binary",
            ("bce",),
            ("auroc", "accuracy", "balanced_accuracy", "macro_f1", "average_precision", "log_loss", "ece"),
            2,
        ),
        Task("multilabel", ("bce",), ("macro_f1", "accuracy", *_RANKED, "log_loss")),
        Task("regression", ("mse", "mae", "huber"), ("rmse", "mae", "r2"), 3),
        Task("sequence", ("cross_entropy",), ("token_accuracy", "perplexity"), 2),
    )
}


def loss_of(task: str, name: str | None) -> str:
    """Return the name of a loss for a task, by default the task's own; refuse a built-in loss of other tasks."""
    suiting = TASKS[task].losses
    if name in LOSSES and name not in suiting:
        raise FedslrError(f"loss: got '{name}', but task = '{task}' takes {' or '.join(suiting)}; change one of them")
    return name or suiting[0]


def metrics_of(task: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the metrics of a task, by default the task's own; refuse built-in metrics of other tasks."""
    suiting = TASKS[task].metrics
    for name in names:
        if name in METRICS and name not in suiting:
            raise FedslrError(
                f"metrics: got '{name}', but task = '{task}' has {', '.join(suiting)}; choose among these"
            )
    return names or suiting[: TASKS[task].default_metrics]
