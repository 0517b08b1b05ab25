"""The broadcast of a round as messages: one for all clients, or one for each client that the method addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedslr.channel import encoding
from fedslr.core.algorithm import Algorithm
from fedslr.core.matrix import LowRank
from fedslr.core.types import Payload
from fedslr.deploy.messages import encode
from fedslr.engine import contract
from fedslr.engine.aggregation import ServerState


class Broadcast:
    """The payload of a round, and the messages that carry it."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], state: ServerState) -> None:
        self.algorithm = algorithm
        self.payload = contract.require_broadcast(algorithm.broadcast(state.server, state.mean_ledger))
        self._to_all = None if algorithm.addresses() else encode(self.payload)

    def message(self, number: int, address: Payload) -> encoding.Message:
        """Return the message to a client."""
        if self._to_all is not None:
            return self._to_all
        return encode(self.algorithm.addressed(self.payload, address, number))

    def form(self, number: int, address: Payload) -> Payload:
        """Return a tree without values that has the form of what a client decodes, and of its upload."""
        return _form(self.algorithm.addressed(self.payload, address, number))

    def shared(self) -> Payload:
        """Return the global model, or what the server holds instead, with factors where the method has them."""
        return self.algorithm.shared(self.payload)

    def shared_message(self) -> encoding.Message:
        """Return the message with the global model for clients that are sent only parts of it."""
        if self._to_all is not None or not self.algorithm.has_global_model:
            return encoding.NOTHING
        return encode(self.shared())

    def ranks(self) -> dict[str, int]:
        """Return the rank of every layer that the server holds as factors."""
        return {name: x.rank for name, x in self.shared().items() if isinstance(x, LowRank)}


def _form(payload: Payload) -> Payload:
    return {key: _form(x) if isinstance(x, dict) else _empty(x) for key, x in payload.items()}


def _empty(leaf: Tensor | LowRank) -> Tensor:
    dtype = leaf.u.dtype if isinstance(leaf, LowRank) else leaf.dtype
    return torch.empty(tuple(leaf.shape), dtype=dtype, device="meta")
