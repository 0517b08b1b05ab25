"""Summarise a metric over clients and evaluations, from the records of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from fedslr.tasks.metrics import METRICS, Metric
from fedslr.tasks.scoring import Scores

PerClient = list[float | None]
"""One value per client; None for a client without test data."""

MODELS = ("global", "personal")


SPELLINGS = {
    "auroc": "AUROC",
    "mae": "MAE",
    "rmse": "RMSE",
    "ece": "ECE",
    "r2": "R²",
    "macro_f1": "macro F1",
    "top5_accuracy": "top-5 accuracy",
}
"""Names of metrics that are not plain words."""


class Headline(NamedTuple):
    """The metric that stands for the others in tables and figures."""

    name: str = "accuracy"
    larger_is_better: bool = True
    is_share: bool = True
    """Whether values are shares from 0 to 1, which tables show in per cent."""

    @property
    def words(self) -> str:
        """The metric's name in running text."""
        return SPELLINGS.get(self.name, self.name.replace("_", " "))

    @property
    def factor(self) -> float:
        """The number by which tables and charts multiply values: 100 for shares, which they show in per cent."""
        return 100.0 if self.is_share else 1.0

    @property
    def unit(self) -> str:
        """The unit of shown values, after a space."""
        return " %" if self.is_share else ""

    def text(self, value: float | None) -> str:
        """Return a value for a line of text."""
        if value is None:
            return "–"
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.4g}"

    def key(self, model: str, per_client: bool = False) -> str:
        """Return the metric's key in records, of the global or the personal models."""
        return f"{self.name}_{model}{'_per_client' if per_client else ''}"

    def best(self, values: Iterable[float]) -> float:
        """Return the best value."""
        return max(values) if self.larger_is_better else min(values)


ACCURACY = Headline()


def headline_of(summary: Mapping[str, Any]) -> Headline:
    """Return the headline of a run from its summary."""
    return Headline(**summary["metric"]) if "metric" in summary else ACCURACY


def find_headline(name: str | None) -> Headline:
    """Return the headline of a name in a record; None stands for accuracy. An own function's values are numbers."""
    if name is None:
        return ACCURACY
    known = METRICS.get(name)
    return Headline(name, is_share=False) if known is None else headline(known)


def headline(metric: Metric) -> Headline:
    """Return a metric as a headline."""
    return Headline(metric.name, metric.larger_is_better, metric.is_share)


class Evaluation(NamedTuple):
    """Every client's scores with the global and with its personal model; None if a method has no global model."""

    global_: list[Scores] | None
    personal: list[Scores]


def average(values: Sequence[float | None] | None) -> float | None:
    """Return the unweighted mean over the clients that have test data."""
    known = [v for v in values or [] if v is not None]
    return fmean(known) if known else None


def _evaluations(
    records: Sequence[Mapping[str, Any]], model: str, clients: str, metric: Headline
) -> list[dict[int, float]]:
    """Return the values of every evaluation by client: of all clients, or of those sampled in its round."""
    found = []
    for record in records:
        each = record.get(metric.key(model, per_client=True))
        if not each:
            continue
        evaluated = record.get("evaluated") or range(len(each))
        wanted = set(record["clients"] if clients == "sampled" else evaluated)
        if known := {c: v for c, v in zip(evaluated, each, strict=True) if c in wanted and v is not None}:
            found.append(known)
    return found


LATE_EVALUATIONS = 5
"""How many of the last evaluations "late" averages. A single evaluation depends on the clients of its round."""


def _picked(
    records: Sequence[Mapping[str, Any]], model: str, pick: str, clients: str, metric: Headline
) -> list[float] | None:
    """Return the values of the last or the best evaluation, or every client's mean over the late ones."""
    found = _evaluations(records, model, clients, metric)
    if not found:
        return None
    if pick == "late":
        late = found[-LATE_EVALUATIONS:]
        return [fmean(one[c] for one in late if c in one) for c in sorted(set().union(*late))]
    if pick == "best":
        means = [fmean(one.values()) for one in found]
        return list(found[means.index(metric.best(means))].values())
    return list(found[-1].values())


def evaluations(records: Sequence[Mapping[str, Any]], metric: Headline = ACCURACY) -> int:
    """Return how many rounds were evaluated."""
    return len(_evaluations(records, "personal", "all", metric))


def mean_over_clients(
    records: Sequence[Mapping[str, Any]], pick: str = "last", clients: str = "all", metric: Headline = ACCURACY
) -> dict[str, float | None]:
    """Return a metric's mean over clients for the global and for the personal models.

    Args:
        records: The records of a run.
        pick: The evaluation: "last", "best" or "late" (the mean of the last five).
        clients: The clients: "all", or "sampled" in the round of the evaluation.
        metric: The metric.
    """
    return {model: average(_picked(records, model, pick, clients, metric)) for model in MODELS}


def worst_decile(
    records: Sequence[Mapping[str, Any]],
    pick: str = "last",
    clients: str = "all",
    model: str = "personal",
    metric: Headline = ACCURACY,
) -> float | None:
    """Return the mean over the tenth of the clients (at least one) with the worst values of a metric."""
    known = sorted(_picked(records, model, pick, clients, metric) or [], reverse=not metric.larger_is_better)
    return fmean(known[: max(1, len(known) // 10)]) if known else None


def fairness(record: Mapping[str, Any], metric: Headline = ACCURACY) -> dict[str, dict[str, float] | None]:
    """Return the standard deviation over clients and the worst decile, for both models."""
    found: dict[str, dict[str, float] | None] = {}
    for model in MODELS:
        worst = worst_decile([record], model=model, metric=metric)
        known = _picked([record], model, "last", "all", metric)
        found[model] = None if known is None or worst is None else {"std": pstdev(known), "worst_decile": worst}
    return found
