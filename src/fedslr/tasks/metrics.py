"""Metrics by name: functions of all of a client's targets and of what its model says about them.

The functions are scikit-learn's, which fedslr needs anyway. They see whole outputs, because figures such as the area
under a curve are no means over batches. A metric that a client's targets do not define, such as the area under the
curve of a client with one class, is None for this client.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fedslr.core import plugins
from fedslr.core.errors import FedslrError, suggest

Array = np.ndarray[Any, Any]
Score = Callable[[Array, Array], float]
"""A function of targets and predictions. Predictions are probabilities (regression: numbers) of the model's shape."""

CALIBRATION_BINS = 15


class Metric(NamedTuple):
    """A metric."""

    name: str
    score: Score
    larger_is_better: bool = True
    is_share: bool = True
    """Whether values are shares from 0 to 1, which tables show in per cent."""


def _sklearn(name: str, *args: Any, **options: Any) -> Any:
    import sklearn.metrics  # It takes a second to import.

    return float(getattr(sklearn.metrics, name)(*args, **options))


def chosen(predictions: Array) -> Array:
    """Return the predicted labels: the most probable class, or the labels that are more probable than not."""
    several = predictions.ndim == 2 and predictions.shape[1] > 1
    return predictions.argmax(1) if several else (predictions.reshape(len(predictions)) > 0.5).astype(np.int64)


def _labels(name: str, targets: Array, predictions: Array, **options: Any) -> Any:
    """Score predicted labels; several labels per sample are predicted one by one."""
    decided = (predictions > 0.5).astype(np.int64) if targets.ndim == 2 else chosen(predictions)
    return _sklearn(name, targets, decided, **options)


def _all_classes(predictions: Array) -> Array:
    return np.arange(predictions.shape[1])


def _top_five(targets: Array, predictions: Array) -> float:
    most = min(5, predictions.shape[1])
    return float(_sklearn("top_k_accuracy_score", targets, predictions, k=most, labels=_all_classes(predictions)))


def _ranking(name: str, targets: Array, predictions: Array, **options: Any) -> Any:
    """Score probabilities by their order. Of several classes, the mean over those that occur is taken."""
    if targets.ndim == 2 or predictions.shape[1] == 1:
        return _sklearn(name, targets, predictions if targets.ndim == 2 else predictions[:, 0], **options)
    present = [c for c in _all_classes(predictions) if 0 < (targets == c).sum() < len(targets)]
    each = [_sklearn(name, targets == c, predictions[:, c]) for c in present]
    return float(np.mean(each)) if each else math.nan


def _log_loss(targets: Array, predictions: Array) -> float:
    if targets.ndim == 2:
        pairs = zip(targets.T, predictions.T, strict=True)
        return float(np.mean([_sklearn("log_loss", t, p, labels=[0, 1]) for t, p in pairs]))
    if predictions.shape[1] == 1:
        return float(_sklearn("log_loss", targets, predictions[:, 0], labels=[0, 1]))
    return float(_sklearn("log_loss", targets, predictions, labels=_all_classes(predictions)))


def _calibration_error(targets: Array, predictions: Array) -> float:
    """Return the expected calibration error: Guo et al., On Calibration of Modern Neural Networks (ICML 2017)."""
    several = predictions.shape[1] > 1
    confidence = predictions.max(1) if several else np.maximum(predictions[:, 0], 1 - predictions[:, 0])
    right = chosen(predictions) == targets
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = [abs(right[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    return float(sum(gaps))


def _perplexity(targets: Array, predictions: Array) -> float:
    return math.exp(_log_loss(targets, predictions))


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", partial(_labels, "accuracy_score")),
        Metric("top5_accuracy", _top_five),
        Metric("balanced_accuracy", partial(_labels, "balanced_accuracy_score")),
        Metric("macro_f1", partial(_labels, "f1_score", average="macro", zero_division=0)),
        Metric("auroc", partial(_ranking, "roc_auc_score")),
        Metric("average_precision", partial(_ranking, "average_precision_score")),
        Metric("log_loss", _log_loss, larger_is_better=False, is_share=False),
        Metric("ece", _calibration_error, larger_is_better=False),
        Metric("mae", partial(_sklearn, "mean_absolute_error"), larger_is_better=False, is_share=False),
        Metric("rmse", partial(_sklearn, "root_mean_squared_error"), larger_is_better=False, is_share=False),
        Metric("r2", partial(_sklearn, "r2_score"), is_share=False),
        Metric("token_accuracy", partial(_labels, "accuracy_score")),
        Metric("perplexity", _perplexity, larger_is_better=False, is_share=False),
    )
}


def find(name: str) -> Metric:
    """Return a built-in metric, or a user's own function by its `module:function`.

    An own function takes targets and predictions and returns a number. Its attributes `larger_is_better` (True unless
    given) and `is_share` (False unless given) say how to read the number.
    """
    if name in METRICS:
        return METRICS[name]
    if not plugins.is_name(name):
        raise FedslrError(
            f"metrics: got '{name}', no such metric; {suggest(name, METRICS)} (or module:function of your own)"
        )
    score = plugins.function("metrics", name, "targets", "predictions")
    larger, share = getattr(score, "larger_is_better", True), getattr(score, "is_share", False)
    return Metric(name.rpartition(":")[2], score, bool(larger), bool(share))


def measure(metric: Metric, targets: Array, predictions: Array) -> float | None:
    """Return a metric's value; None if these targets do not define it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = float(metric.score(targets, predictions))
        except ValueError:
            if metric.name not in METRICS:
                raise
            return None
    return value if math.isfinite(value) else None
