"""The server's state, its broadcast, and its copies of the clients' ledgers, in memory and in the database.

The mean ledger is the mean of the ledgers of all members, weighted by ω. A client that joins, leaves or changes its
number of examples moves the mean ledger by exactly its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedslr.channel import encoding
from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.matrix import LowRank
from fedslr.core.server_optimizers import ServerOptimizer
from fedslr.core.states import plain, restore
from fedslr.core.tree import Tree
from fedslr.core.types import Payload, Round
from fedslr.deploy.database import Counted, Database, Enrolled
from fedslr.deploy.messages import encode, next_head
from fedslr.deploy.uploads import Upload
from fedslr.engine import contract
from fedslr.engine.aggregation import (
    FULL_SHARE,
    ServerState,
    book,
    close_round,
    first_server_state,
    weight_of,
    with_member,
)
from fedslr.engine.delivery import Broadcast


class Account(NamedTuple):
    """The server's copy of a client's ledger, and of what the method needs to address the client, such as a mask."""

    ledger: Any
    address: Payload
    """It came with the client's last counted upload."""

    def to_tree(self) -> Tree | None:
        """Return the account as a tree; None for a method that keeps neither ledgers nor addresses."""
        ledger = plain(self.ledger)
        return {"ledger": ledger, "address": self.address} if ledger or self.address else None


class EncodedBroadcast(Broadcast):
    """The broadcast of a server's state, and the messages that carry it: the same for all clients, or one for each."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], state: ServerState) -> None:
        super().__init__(algorithm, state)
        self.state = state
        self._to_all = None if algorithm.addresses() else encode(self.payload)

    def message(self, number: int, address: Payload) -> encoding.Message:
        """Return the message to a client."""
        return self._to_all or encode(self.algorithm.addressed(self.payload, address, number))

    def form(self, number: int, address: Payload) -> Payload:
        """Return a tree without values that has the form of a client's decoded payload, and of its upload."""
        return tree.map(_without_values, self.algorithm.addressed(self.payload, address, number))

    def shared_message(self) -> encoding.Message:
        """Return the message with the global model for clients whose own message holds only parts of it."""
        in_payload = self._to_all is not None or not self.algorithm.has_global_model
        return encoding.NOTHING if in_payload else encode(self.shared())


def _without_values(leaf: Tensor | LowRank) -> Tensor:
    dtype = leaf.u.dtype if isinstance(leaf, LowRank) else leaf.dtype
    return torch.empty(tuple(leaf.shape), dtype=dtype, device="meta")


def to_tree(state: ServerState) -> Tree:
    """Return the server's state as a tree."""
    return {name: plain(part) for name, part in state._asdict().items()}


class Accounts:
    """The members of a federation, their accounts and the server's state."""

    def __init__(
        self, database: Database, algorithm: Algorithm[Any, Any, Any], optimizer: ServerOptimizer | None = None
    ) -> None:
        self.database, self.algorithm, self.optimizer = database, algorithm, optimizer
        self.start = database.tree("start")
        client = algorithm.init_client(contract.private_copy(self.start))
        self.fresh = Account(algorithm.init_ledger(contract.private_copy(self.start)), algorithm.address(client))
        """The account of a client before its first counted upload."""
        like, kept = first_server_state(algorithm, contract.private_copy(self.start)), database.tree("server")
        server, ledger = restore(like.server, kept["server"]), restore(like.mean_ledger, kept["mean_ledger"])
        self.state = ServerState(server, ledger, kept.get("moments", {}))
        self.members = database.members()
        self._broadcast: EncodedBroadcast | None = None

    @property
    def broadcast(self) -> EncodedBroadcast:
        """The broadcast of the server's present state."""
        return self.broadcast_of(self.state)

    def broadcast_of(self, state: ServerState) -> EncodedBroadcast:
        """Return the broadcast of a state, made once until another state is asked for."""
        if self._broadcast is None or self._broadcast.state is not state:
            self._broadcast = EncodedBroadcast(self.algorithm, state)
        return self._broadcast

    def account(self, number: int) -> Account:
        """Return a client's account; a client without a counted upload has the account that it began with."""
        kept = self.database.account(self.members[number])
        return self.fresh if kept is None else Account(restore(self.fresh.ledger, kept["ledger"]), kept["address"])

    def address(self, number: int) -> Payload:
        """Return the address of a client; the account is read only if the method needs it."""
        return self.account(number).address if self.algorithm.addresses() else self.fresh.address

    def set_address(self, number: int, address: Payload) -> None:
        """Replace the address of a client that was enrolled again."""
        account = self.account(number)._replace(address=address).to_tree()
        if account is not None:
            self.database.set_account(number, account)
            self.reread_members()

    # --- members ------------------------------------------------------------------------------------------------------

    def weight(self, number: int) -> float:
        """Return the weight ω of a client."""
        return weight_of(self.algorithm, self.members[number].examples)

    def total_weight(self) -> float:
        """Return Σ ω over all members."""
        return sum(self.weight(number) for number in self.members)

    def join(self, member: Enrolled) -> None:
        """Let a client join with a new ledger."""
        state = self._moved(self.fresh.ledger, weight_of(self.algorithm, member.examples))
        self.database.add(member, self._changed(state))
        self.advance(state)

    def leave(self, number: int) -> None:
        """Let a client leave with its ledger."""
        state = self._moved(self.account(number).ledger, -self.weight(number))
        self.database.remove(number, self._changed(state))
        self.advance(state)

    def bind(self, number: int, identity: str, examples: int) -> None:
        """Give the number of a known client to another node, which may have another number of examples."""
        change = weight_of(self.algorithm, examples) - self.weight(number)
        state = self._moved(self.account(number).ledger, change)
        self.database.bind(number, identity, examples, self._changed(state))
        self.advance(state)

    def _moved(self, ledger: Any, weight: float) -> ServerState:
        """Return the server's state after a ledger with a weight was added to the mean ledger."""
        if weight == 0 or not self.database.fact("done"):  # before the first round all ledgers are the same
            return self.state
        return self.state._replace(mean_ledger=with_member(self.state.mean_ledger, self.total_weight(), ledger, weight))

    def _changed(self, state: ServerState) -> Tree | None:
        return None if state is self.state else to_tree(state)

    def reread_members(self) -> None:
        """Read the members from the database, which the command line changes too."""
        self.members = self.database.members()

    # --- rounds -------------------------------------------------------------------------------------------------------

    def close(self, uploads: Mapping[int, Upload], round: Round) -> ServerState:
        """Return the server's state after a round with these uploads; its broadcast can be sent."""
        mean = tree.Mean()
        for number, upload in uploads.items():
            mean.add(upload.tree, self.weight(number))
        each = {number: upload.tree for number, upload in uploads.items()}
        state = close_round(self.algorithm, self.state, mean, self.total_weight(), round, each, self.optimizer)
        self.broadcast_of(state)  # Encoding fails for a model that diverged; the round is not committed then.
        return state

    def counted(self, number: int, upload: Upload, round: Round, attempt: int) -> Counted:
        """Return a counted upload with its client's head and account after it."""
        head = next_head(self.members[number].head, round.number, attempt, upload.digest, upload.scale)
        ledger = book(self.algorithm, self.account(number).ledger, upload.tree, FULL_SHARE, round)
        account = Account(ledger, upload.address).to_tree()
        return Counted(number, round.number, attempt, upload.digest, upload.scale, head, account)

    def advance(self, state: ServerState) -> None:
        """Take over a state that the database has committed."""
        self.state = state
        self.reread_members()
