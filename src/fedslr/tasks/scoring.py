"""The scores of a model on one client's samples: the loss and every metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedslr.core.targets import IGNORED
from fedslr.core.types import Loss
from fedslr.tasks import TASKS, metrics

Scores = dict[str, float | None]
"""Values by name: every metric, and the loss. None if a client's samples do not define the value."""


class Scorer:
    """Scores outputs for a task.

    Args:
        task: The name of the task.
        loss: The loss of every sample, or the mean loss.
        names: The metrics. The first is the headline.
    """

    def __init__(self, task: str, loss: Loss, names: Sequence[str]) -> None:
        self.task, self.loss = TASKS[task], loss
        self.metrics = [metrics.find(name) for name in names]

    @property
    def headline(self) -> metrics.Metric:
        """The metric that stands for the others in tables and figures."""
        return self.metrics[0]

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> float | None:
        """Return the mean loss of some samples; None without samples."""
        if not len(targets):
            return None
        found = float(self.loss(outputs, targets).mean())
        return found if math.isfinite(found) else None

    def score(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Return the mean loss and every metric of one model on one client's test samples."""
        scores: Scores = {"test_loss": self.mean_loss(outputs, targets)}
        predictions = self.task.predictions(outputs.double())
        if self.task.name == "sequence":
            labelled = targets != IGNORED
            predictions, targets = predictions[labelled], targets[labelled]
        elif self.task.name == "regression":
            targets = targets.reshape(predictions.shape)
        shown = targets.numpy(), predictions.numpy()
        known = bool(torch.isfinite(predictions).all()) and len(targets) > 0
        return scores | {m.name: metrics.measure(m, *shown) if known else None for m in self.metrics}
