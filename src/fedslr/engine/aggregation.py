"""From the uploads of a round to the server's next state: the counting rule, in one place for every engine.

With the weight ω of a client and the share in [0, 1] of its upload that counts:

    d = Σ_S ω·share      mean upload = Σ_S ω·share·upload / d
    mean ledger ← book(mean ledger, mean upload, d / Σ_all ω)

The mean ledger is the ω-weighted mean of the ledgers of all clients. Since `book` is affine in its share, it stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from fedslr.core.algorithm import Algorithm, LedgerChange
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.server_optimizers import ServerOptimizer
from fedslr.core.tree import Mean, Tree
from fedslr.core.types import Params, Payload, Round
from fedslr.engine import contract

FULL_SHARE = torch.tensor(1.0, dtype=torch.float64)
"""The share of an upload that counts in full."""


class ServerState(NamedTuple):
    """All that a server keeps from round to round."""

    server: Any
    mean_ledger: Any
    moments: Tree = {}  # noqa: RUF012
    """The moments of the server's optimizer; empty before the first round, and without an optimizer."""


def first_server_state(algorithm: Algorithm[Any, Any, Any], w: Params) -> ServerState:
    """Return the server's state before the first round, from the initial model."""
    server = contract.require_storable("init_server", algorithm.init_server(w))
    return ServerState(server, contract.require_storable("init_ledger", algorithm.init_ledger(w)))


def weight_of(algorithm: Algorithm[Any, Any, Any], examples: int) -> float:
    """Return the weight ω of a client with so many examples."""
    weight = float(algorithm.weight(examples))
    if not (math.isfinite(weight) and weight >= 0):
        raise FedslrError(f"weight: got {weight} for {examples} examples, expected a number from 0")
    return weight


def book(algorithm: Algorithm[Any, Any, Any], ledger: Any, upload: Payload, share: Tensor, round: Round) -> Any:
    """Return a ledger after a share of an upload was counted, in the types of the ledger.

    A double-precision share leaves matrices in single precision, but not parameters that are single numbers.
    """
    booked = algorithm.book(ledger, upload, share, round)
    return pytree.tree_map(lambda x, before: x.to(before.dtype), booked, ledger)


def close_round(
    algorithm: Algorithm[Any, Any, Any],
    state: ServerState,
    uploads: Mean,
    total_weight: float,
    round: Round,
    each: Mapping[int, Payload] | None = None,
    optimizer: ServerOptimizer | None = None,
) -> ServerState:
    """Book the uploads of a round in the mean ledger and aggregate them; return the state unchanged if none counted.

    Args:
        algorithm: The method.
        state: The server's state before the round.
        uploads: The mean of the counted uploads, with weights ω·share.
        total_weight: Σ ω over all clients of the federation.
        round: The round.
        each: share·upload by client, for a method that must see every upload.
        optimizer: The server's optimizer, whose step the server adds to its model in place of the mean upload.
    """
    if uploads.weight == 0:
        return state
    mean = uploads.value()
    share = torch.tensor(uploads.weight / total_weight, dtype=torch.float64)
    after = book(algorithm, state.mean_ledger, mean, share, round)
    change = LedgerChange(state.mean_ledger, after)
    update, moments = (mean, state.moments) if optimizer is None else optimizer.step(mean, state.moments)
    server = algorithm.aggregate(state.server, change, update if algorithm.server_sees == "mean" else each, round)
    return ServerState(server, after, moments)


def with_member(mean_ledger: Any, total_weight: float, ledger: Any, weight: float) -> Any:
    """Return the mean ledger after a client joined; a negative weight is that of a client that leaves."""
    total = total_weight + weight
    return pytree.tree_map(lambda m, x: (total_weight * m + weight * x) / total, mean_ledger, ledger)


@contextmanager
def noting_divergence(number: int, more: str = "") -> Iterator[None]:
    """Report that the global model diverged in a round, counted from 0; `more` is added to the advice."""
    try:
        yield
    except (WireError, LinAlgError) as error:
        why = str(error).splitlines()[0]
        raise FedslrError(
            f"round {number + 1}: the global model diverged: {why}; lower lr or the method's step sizes{more}"
        ) from error
