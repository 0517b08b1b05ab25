"""The state of a run after a round: the server, the clients, and the next broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from fedslr.channel.transport import Measured
from fedslr.core.tree import Mean
from fedslr.core.types import Params, Payload, Round
from fedslr.data.federation import Federation
from fedslr.engine import fingerprints
from fedslr.engine.aggregation import ServerState, close_round, first_server_state, weight_of
from fedslr.engine.delivery import Delivery
from fedslr.engine.roster import Roster
from fedslr.engine.workload import Workload
from fedslr.storage.client_store import ClientStore

NextRound = tuple[ServerState, Delivery]


class RunState:
    """A server, its clients and the next broadcast."""

    def __init__(self, work: Workload, federation: Federation, transport: Measured, store: ClientStore) -> None:
        self.work, self.federation, self.transport, self.store = work, federation, transport, store
        self.algorithm, self.problem = work.algorithm, work.problem
        self.weights = [weight_of(self.algorithm, n) for n in work.examples]
        """The weight ω of every client."""
        self.start_from(self.problem.params())

    def start_from(self, start: Params, server_state: ServerState | None = None, done: int = 0) -> None:
        """Take an initial model and, to go on from a checkpoint, the server's state after `done` rounds."""
        self.start, self.done = start, done
        self.roster = Roster(self.algorithm, start, self.store)
        self.server_state = first_server_state(self.algorithm, start) if server_state is None else server_state
        self.delivery = self.deliver(self.server_state)

    def deliver(self, server_state: ServerState) -> Delivery:
        """Return the broadcast of a server's state."""
        return Delivery(self.algorithm, server_state, self.transport)

    def next_round(self, uploads: Mean, each: Mapping[int, Payload], round: Round) -> NextRound:
        """Return the server's state after a round and its broadcast; nothing here changes."""
        optimizer = self.work.server_optimizer
        after = close_round(self.algorithm, self.server_state, uploads, sum(self.weights), round, each, optimizer)
        return after, self.deliver(after)

    def advance(self, after: NextRound) -> None:
        """End a round: take the server's next state and its broadcast."""
        self.server_state, self.delivery = after
        self.done += 1

    def global_model(self) -> Params | None:
        """Return the dense global model; None for a method without one."""
        return self.delivery.global_model(self.start)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digests of the run's data and model, which a checkpoint keeps."""
        return {"data": fingerprints.of_data(self.federation), "model": fingerprints.of_model(self.problem.model)}
