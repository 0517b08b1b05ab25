"""Summarise accuracies over clients and evaluations, from the records of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

PerClient = list[float | None]
"""One value per client; None for a client without test data."""

MODELS = ("global", "personal")


class Evaluation(NamedTuple):
    """Every client's accuracy with the global and with its personal model; None if a method has no global model."""

    global_: PerClient | None
    personal: PerClient


def average(values: Sequence[float | None] | None) -> float | None:
    """Return the unweighted mean over the clients that have test data."""
    known = [v for v in values or [] if v is not None]
    return fmean(known) if known else None


def _evaluations(records: Sequence[Mapping[str, Any]], model: str, clients: str) -> list[dict[int, float]]:
    """Return the accuracies of every evaluation by client: of all clients, or of those sampled in its round."""
    found = []
    for record in records:
        each = record.get(f"accuracy_{model}_per_client")
        if not each:
            continue
        evaluated = record.get("evaluated") or range(len(each))
        wanted = set(record["clients"] if clients == "sampled" else evaluated)
        if known := {c: v for c, v in zip(evaluated, each, strict=True) if c in wanted and v is not None}:
            found.append(known)
    return found


LATE_EVALUATIONS = 5
"""How many of the last evaluations "late" averages. A single evaluation depends on the clients of its round."""


def _picked(records: Sequence[Mapping[str, Any]], model: str, pick: str, clients: str) -> list[float] | None:
    """Return the accuracies of the last or the best evaluation, or every client's mean over the late ones."""
    found = _evaluations(records, model, clients)
    if not found:
        return None
    if pick == "late":
        late = found[-LATE_EVALUATIONS:]
        return [fmean(one[c] for one in late if c in one) for c in sorted(set().union(*late))]
    chosen = max(found, key=lambda one: fmean(one.values())) if pick == "best" else found[-1]
    return list(chosen.values())


def evaluations(records: Sequence[Mapping[str, Any]]) -> int:
    """Return how many rounds were evaluated."""
    return len(_evaluations(records, "personal", "all"))


def accuracy(records: Sequence[Mapping[str, Any]], pick: str = "last", clients: str = "all") -> dict[str, float | None]:
    """Return the mean accuracy of the global and of the personal models.

    Args:
        records: The records of a run.
        pick: The evaluation: "last", "best" or "late" (the mean of the last five).
        clients: The clients: "all", or "sampled" in the round of the evaluation.
    """
    return {model: average(_picked(records, model, pick, clients)) for model in MODELS}


def worst_decile(
    records: Sequence[Mapping[str, Any]], pick: str = "last", clients: str = "all", model: str = "personal"
) -> float | None:
    """Return the mean accuracy of the tenth of the clients (at least one) with the lowest accuracy."""
    known = sorted(_picked(records, model, pick, clients) or [])
    return fmean(known[: max(1, len(known) // 10)]) if known else None


def fairness(record: Mapping[str, Any]) -> dict[str, dict[str, float] | None]:
    """Return the standard deviation over clients and the worst decile, for both models."""
    found: dict[str, dict[str, float] | None] = {}
    for model in MODELS:
        worst, known = worst_decile([record], model=model), _picked([record], model, "last", "all")
        found[model] = None if known is None or worst is None else {"std": pstdev(known), "worst_decile": worst}
    return found
