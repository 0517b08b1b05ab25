"""The figures of a finished run, as summary.json holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedslr.algorithms import naming
from fedslr.channel import model_size
from fedslr.core.algorithm import Algorithm
from fedslr.core.matrix import full_ranks
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.storage import statistics
from fedslr.tasks.metrics import Metric


class Figures(NamedTuple):
    """The figures of a summary that the records do not have."""

    algorithm: str
    dataset: str
    clients: int
    rounds: int
    seed: int
    sizes: model_size.Sizes
    seconds: Mapping[str, float]
    rank_full: Mapping[str, int]
    """The largest rank that every layer can have."""
    metrics: Sequence[Metric]
    """The metrics of the run, the headline first."""


def figures(simulation: Simulation) -> Figures:
    return Figures(
        simulation.algorithm.name,
        simulation.federation.name,
        simulation.num_clients,
        simulation.state.done,
        simulation.settings.seed,
        simulation.sizes(),
        simulation.seconds,
        full_ranks(simulation.state.start),
        simulation.state.work.scorer.metrics,
    )


def is_rerunnable(algorithm: Algorithm[Any, Any, Any], federation: Federation, given: Mapping[str, str]) -> bool:
    """Whether config.toml alone is enough to do the run again: nothing was given that has no name in a recipe."""
    return not given and federation.options is not None and naming.is_importable(type(algorithm))


def _last(record: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """Return the mean over clients of a score in the last round, for both models."""
    return {model: record.get(f"{name}_{model}") for model in statistics.MODELS}


def summarize(
    run: Figures, records: list[dict[str, Any]], rerunnable: bool, given: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The figures of a finished run, as summary.json has them; `given` is what config.toml has no name for."""
    last, metric = records[-1], statistics.headline(run.metrics[0])
    numbers = sum(r["numbers_down"] + r["numbers_up"] for r in records)
    return {
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "clients": run.clients,
        "rounds": run.rounds,
        "seed": run.seed,
        "rerunnable": rerunnable,
        **({"given": dict(given)} if given else {}),
        "metric": metric._asdict(),
        metric.name: statistics.mean_over_clients(records, metric=metric),
        f"{metric.name}_best": statistics.mean_over_clients(records, pick="best", metric=metric),
        f"{metric.name}_sampled": statistics.mean_over_clients(records, clients="sampled", metric=metric),
        "fairness": statistics.fairness(last, metric),
        "scores": {name: _last(last, name) for name in ("train_loss", "test_loss", *(m.name for m in run.metrics))},
        "parameters": run.sizes.summary(),
        "rank": last["rank"],
        "rank_full": {name: run.rank_full[name] for name in last["rank"] if name in run.rank_full},
        "bytes": {"down": sum(r["bytes_down"] for r in records), "up": sum(r["bytes_up"] for r in records)},
        "paper_gb": model_size.gigabytes(numbers),
        "seconds": {k: round(v, 6) for k, v in run.seconds.items()},
    }
