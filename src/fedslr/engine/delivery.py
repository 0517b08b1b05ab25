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
from fedslr.engine.aggregation import ServerState
from fedslr.engine.workload import Member


class Broadcast:
    """The payload that the server of a round has for all clients."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], state: ServerState) -> None:
        self.algorithm = algorithm
        self.payload = contract.require_broadcast(algorithm.broadcast(state.server, state.mean_ledger))

    def shared(self) -> Payload:
        """Return the global model; for a method without one, the tensors that the server holds."""
        return self.algorithm.shared(self.payload)

    def ranks(self) -> dict[str, int]:
        """Return the rank of every layer that the server holds as factors."""
        return {name: x.rank for name, x in self.shared().items() if isinstance(x, LowRank)}


class Delivery(Broadcast):
    """A broadcast in a simulation: the payload of each client and the sizes of the messages."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], state: ServerState, transport: Measured) -> None:
        super().__init__(algorithm, state)
        self.transport = transport
        self.sizes: dict[int, Size] = {}
        """The size of the message to every client that was sent one."""
        self._compact: Payload | None = None
        self._same_for_all = None if algorithm.addresses() else transport.send(self.payload)
        """The message to every client, unless the method addresses each one."""
        if self._same_for_all is None:
            factored.require_finite(self.payload)

    def send(self, number: int, member: Member) -> Payload:
        """Send a client its message; return the payload that the client decodes from it."""
        message = self._same_for_all
        if message is None:
            message = self.transport.send(self._addressed(number, member))
        self.sizes[number], payload = message
        return payload

    def decoded(self, number: int, member: Member) -> Payload:
        """Return the payload of a client without sending it."""
        if self._same_for_all is not None:
            return self._same_for_all[1]
        return factored.multiply_out(self._addressed(number, member))

    def compact(self, number: int, member: Member) -> Payload:
        """Return the payload of a client with factors where they are smaller than their matrix."""
        if self.algorithm.addresses():
            return factored.smaller_forms(self._addressed(number, member))
        if self._compact is None:
            self._compact = factored.smaller_forms(self.payload)
        return self._compact

    def _addressed(self, number: int, member: Member) -> Payload:
        return self.algorithm.addressed(self.payload, member.address, number)

    def global_model(self, like: Params) -> Params | None:
        """Return the dense global model; None for a method without one."""
        if not self.algorithm.has_global_model:
            return None
        return contract.require_model("shared", factored.multiply_out(self.shared()), like)
