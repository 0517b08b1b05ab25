"""The server's state and its copies of the clients' ledgers, in memory and in the database.

The mean ledger is the mean of the ledgers of all members, weighted by ω. A client that joins, leaves or changes its
number of examples moves the mean ledger by exactly its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.states import plain, restore
from fedslr.core.tree import Tree
from fedslr.core.types import Payload, Round
from fedslr.deploy.broadcasts import Broadcast
from fedslr.deploy.ledger import Counted, Enrolled, Ledger
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


class Account(NamedTuple):
    """The server's copy of a client's ledger, and the address that came with the client's last counted upload."""

    ledger: Any
    address: Payload

    def to_tree(self) -> Tree | None:
        """Return the account as a tree; None for a method that keeps neither ledgers nor addresses."""
        ledger = plain(self.ledger)
        return {"ledger": ledger, "address": self.address} if ledger or self.address else None


def to_tree(state: ServerState) -> Tree:
    """Return the server's state as a tree."""
    return {name: plain(part) for name, part in state._asdict().items()}


class Accounts:
    """The members of a federation, their accounts and the server's state."""

    def __init__(self, ledger: Ledger, algorithm: Algorithm[Any, Any, Any]) -> None:
        self.ledger, self.algorithm = ledger, algorithm
        self.start = ledger.tree("start")
        client = algorithm.init_client(contract.own(self.start))
        self.fresh = Account(algorithm.init_ledger(contract.own(self.start)), algorithm.address(client))
        """The account of a client that was never counted."""
        like, kept = first_server_state(algorithm, contract.own(self.start)), ledger.tree("server")
        self.state = ServerState(restore(like.server, kept["server"]), restore(like.mean_ledger, kept["mean_ledger"]))
        self.members = ledger.members()
        self._broadcast: tuple[ServerState, Broadcast] | None = None

    @property
    def broadcast(self) -> Broadcast:
        """The broadcast of the server's present state."""
        return self.broadcast_of(self.state)

    def broadcast_of(self, state: ServerState) -> Broadcast:
        """Return the broadcast of a state; the last one is remembered."""
        if self._broadcast is None or self._broadcast[0] is not state:
            self._broadcast = (state, Broadcast(self.algorithm, state))
        return self._broadcast[1]

    def account(self, number: int) -> Account:
        """Return a client's account; a client that was never counted is as it began."""
        kept = self.ledger.account(self.members[number])
        return self.fresh if kept is None else Account(restore(self.fresh.ledger, kept["ledger"]), kept["address"])

    def address(self, number: int) -> Payload:
        """Return the address of a client; the account is read only if the method needs it."""
        return self.account(number).address if self.algorithm.addresses() else self.fresh.address

    def set_address(self, number: int, address: Payload) -> None:
        """Take the address that a client has after it was enrolled again."""
        account = self.account(number)._replace(address=address).to_tree()
        if account is not None:
            self.ledger.set_account(number, account)
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
        self.ledger.add(member, self._changed(state))
        self.advance(state)

    def leave(self, number: int) -> None:
        """Let a client leave with its ledger."""
        state = self._moved(self.account(number).ledger, -self.weight(number))
        self.ledger.remove(number, self._changed(state))
        self.advance(state)

    def bind(self, number: int, identity: str, examples: int) -> None:
        """Give the number of a known client to another node, which may have another number of examples."""
        change = weight_of(self.algorithm, examples) - self.weight(number)
        state = self._moved(self.account(number).ledger, change)
        self.ledger.bind(number, identity, examples, self._changed(state))
        self.advance(state)

    def _moved(self, ledger: Any, weight: float) -> ServerState:
        """Return the server's state after a ledger of some weight was added to the mean ledger."""
        if weight == 0 or not self.ledger.fact("done"):  # before the first round all ledgers are the same
            return self.state
        return self.state._replace(mean_ledger=with_member(self.state.mean_ledger, self.total_weight(), ledger, weight))

    def _changed(self, state: ServerState) -> Tree | None:
        return None if state is self.state else to_tree(state)

    def reread_members(self) -> None:
        """Take the members from the database, which the command line changes too."""
        self.members = self.ledger.members()

    # --- rounds -------------------------------------------------------------------------------------------------------

    def close(self, uploads: Mapping[int, Upload], round: Round) -> ServerState:
        """Return the server's state after a round with these uploads; its broadcast can be sent."""
        mean = tree.Mean()
        for number, upload in uploads.items():
            mean.add(upload.tree, self.weight(number))
        each = {number: upload.tree for number, upload in uploads.items()}
        state = close_round(self.algorithm, self.state, mean, self.total_weight(), round, each)
        self.broadcast_of(state)
        return state

    def counted(self, number: int, upload: Upload, head: str, round: Round, attempt: int) -> Counted:
        """Return a counted upload with the account of its client after it."""
        before = self.account(number)
        account = Account(book(self.algorithm, before.ledger, upload.tree, FULL_SHARE, round), upload.address)
        return Counted(number, round.number, attempt, upload.digest, upload.scale, head, account.to_tree())

    def advance(self, state: ServerState) -> None:
        """Take the server's state that the database has committed."""
        self.state = state
        self.reread_members()
