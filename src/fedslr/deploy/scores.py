"""The scores of an evaluation as a message carries them: JSON that the server checks before it counts them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedslr.core.errors import WireError
from fedslr.tasks.metrics import Metric
from fedslr.tasks.scoring import Scores

LOSS_NAMES = ("train_loss", "test_loss")


class NodeScores(NamedTuple):
    """The answer of a node to the order to evaluate."""

    shared: Scores | None
    """The scores of the global model; None for a method without one."""
    personal: Scores
    parameters: int
    """The number of parameters that the personal model stores."""


def pack(shared: Scores | None, personal: Scores) -> str:
    """Return the scores of the global model, if there is one, and of the personal model as text."""
    return json.dumps([shared, personal])


def unpack(text: str, metrics: Sequence[Metric], has_global_model: bool) -> tuple[Scores | None, Scores]:
    """Return the scores in a text; raise a WireError if they are not those of these metrics or impossible."""
    try:
        shared, personal = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError("its scores are malformed") from error
    known = {m.name: m for m in metrics} | dict.fromkeys(LOSS_NAMES)
    if (shared is not None) != has_global_model:
        raise WireError("its scores are of other models")
    for scores in (shared, personal) if has_global_model else (personal,):
        if not isinstance(scores, dict) or scores.keys() != known.keys():
            raise WireError("its scores have other names")
        for name, value in scores.items():
            if not _is_possible(value, known[name]):
                raise WireError(f"its {name} of {ascii(value)[:50]} is impossible")
    return shared, personal


def _is_possible(value: Any, metric: Metric | None) -> bool:
    if value is None:
        return True
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and (metric is None or not metric.is_share or 0 <= value <= 1)
