"""The broadcast of a round, and the part of it that each client is sent."""

from __future__ import annotations

from typing import Any

from fedslr.channel.layout import Size
from fedslr.channel.transport import Measured
from fedslr.core import factored
from fedslr.core.algorithm import Algorithm
from fedslr.core.matrix import LowRank
from fedslr.core.types import Params, Payload
from fedslr.engine import contract
from fedslr.engine.workload import Member


class Delivery:
    """A broadcast, its parts for each client, and their sizes."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], transport: Measured, broadcast: Payload) -> None:
        self.algorithm, self.transport = algorithm, transport
        self.broadcast = contract.require_broadcast(broadcast)
        self._compact: Payload | None = None
        self._to_all = None if algorithm.addresses() else transport.send(broadcast)
        """The same message for every client, unless the method addresses each one."""
        if self._to_all is None:
            factored.require_finite(broadcast)

    def send(self, number: int, member: Member) -> tuple[Size, Payload]:
        """Return the size of a client's message and the payload that the client decodes from it."""
        if self._to_all is not None:
            return self._to_all
        return self.transport.send(self._part(number, member))

    def payload(self, number: int, member: Member) -> Payload:
        """Return what a client works with, without sending it."""
        if self._to_all is not None:
            return self._to_all[1]
        return factored.multiply_out(self._part(number, member))

    def parts(self, number: int, member: Member) -> Payload:
        """Return what a client is sent, with factors where they are smaller than their matrix."""
        if self.algorithm.addresses():
            return factored.smaller_forms(self._part(number, member))
        if self._compact is None:
            self._compact = factored.smaller_forms(self.broadcast)
        return self._compact

    def _part(self, number: int, member: Member) -> Payload:
        return self.algorithm.addressed(self.broadcast, member.address, number)

    def shared(self) -> Payload:
        """Return the global model, or what the server holds instead, with factors where the method has them."""
        return self.algorithm.shared(self.broadcast)

    def global_model(self, like: Params) -> Params | None:
        """Return the dense global model; None for a method without one."""
        if not self.algorithm.has_global_model:
            return None
        return contract.require_model("shared", factored.multiply_out(self.shared()), like)

    def ranks(self) -> dict[str, int]:
        """Return the rank of every layer that the server holds as factors."""
        return {name: x.rank for name, x in self.shared().items() if isinstance(x, LowRank)}
