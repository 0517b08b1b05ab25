"""The clients of a run between rounds, and in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedslr.core.algorithm import Algorithm
from fedslr.core.states import plain, restore
from fedslr.core.types import Params, Payload
from fedslr.engine import contract
from fedslr.engine.workload import Member, Participant
from fedslr.storage.client_store import ClientStore


class Roster:
    """The state, ledger and address of every client; a client that never trained has its initial ones."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any], start: Params, store: ClientStore) -> None:
        self.store, self.start = store, start
        client = contract.require_state("init_client", algorithm.init_client(start))
        self.new_member = Member(client, algorithm.init_ledger(start), algorithm.address(client))

    def member(self, number: int) -> Member:
        """Return a client as it is between rounds."""
        kept = self.store.get(number)
        if kept is None:
            return self.new_member
        client, ledger = (restore(getattr(self.new_member, name), kept[name]) for name in ("client", "ledger"))
        return Member(client, ledger, kept["address"])

    def put(self, number: int, member: Member, version: int, local: Params | None = None) -> None:
        """Store a client after a round.

        Args:
            number: The client.
            member: Its state, ledger and address.
            version: The number of finished rounds.
            local: The model that the client uploaded, if diagnostics need it.
        """
        kept = {"client": plain(member.client), "ledger": plain(member.ledger), "address": member.address}
        self.store.put(number, kept if local is None else {**kept, "local": local}, version)

    def local_model(self, number: int) -> Params:
        """Return the model that a client last uploaded; the initial one if it never trained."""
        kept = self.store.get(number)
        return self.start if kept is None else kept["local"]


class Cohort:
    """Some clients with their payloads; iterating reads one client at a time from the store."""

    def __init__(
        self,
        numbers: Sequence[int],
        roster: Roster,
        *,
        payload_of: Callable[[int, Member], Payload],
        known: Mapping[int, Member] | None = None,
    ) -> None:
        self.numbers, self.roster, self.known, self.payload_of = numbers, roster, known or {}, payload_of

    def __iter__(self) -> Iterator[Participant]:
        for number in self.numbers:
            member = self.known[number] if number in self.known else self.roster.member(number)
            yield Participant(number, member, self.payload_of(number, member))
