"""The enrolment of nodes: the server greets and admits unknown ones. Clients join and leave between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fedslr.core.errors import FedslrError, WireError
from fedslr.core.states import plain
from fedslr.deploy.accounts import Accounts
from fedslr.deploy.database import Enrolled
from fedslr.deploy.messages import (
    DONE,
    EIGHT_BIT,
    ENROL,
    NUMBERS,
    UNKNOWN_CLIENT,
    Order,
    Report,
    digest,
    encode,
    first_head,
    quoted,
)
from fedslr.deploy.options import Deployment
from fedslr.deploy.uploads import decode_alike, usual_bytes

GREETING_SECONDS = 60
"""The time after which the server asks an unknown node again."""
MAX_CLIENT_NUMBER, MAX_EXAMPLES = 2**31 - 1, 2**40
"""The server refuses nodes with larger numbers."""


class Enrolment:
    """The server's knowledge of which node is which client."""

    def __init__(self, accounts: Accounts, asked: Deployment, say: Callable[[str], None]) -> None:
        self.accounts, self.database, self.asked, self.say = accounts, accounts.database, asked, say
        self.run = str(self.database.fact("run"))
        self._newcomers: dict[int, Enrolled] = {}
        self._greeted: dict[str, float] = {}
        self._begin_when_complete()

    @property
    def begun(self) -> bool:
        """Whether all clients that the first round waits for have enrolled."""
        return bool(self.database.fact("begun"))

    def client_of(self, identity: str) -> int | None:
        """Return the number of a node's client; None for an unknown node."""
        return next((m.number for m in self.accounts.members.values() if m.identity == identity), None)

    def unknown(self, identities: Iterable[str], now: float) -> list[str]:
        """Return the nodes that the server should ask now which client they are."""
        known = {m.identity for m in (*self.accounts.members.values(), *self._newcomers.values())}
        known |= {node for node, greeted in self._greeted.items() if now <= greeted + GREETING_SECONDS}
        known |= set(self.database.removed())
        unknown = [node for node in identities if node not in known]
        self._greeted |= dict.fromkeys(unknown, now)
        return unknown

    def order(self, number: int | None = None) -> Order:
        """Return the order to enrol, for an unknown node or for a client that lost its state."""
        member = None if number is None else self.accounts.members[number]
        ledger = self.accounts.fresh.ledger if number is None else self.accounts.account(number).ledger
        return Order(
            ENROL,
            self.run,
            UNKNOWN_CLIENT if number is None else number,
            int(self.database.fact("done")),
            0,
            "" if member is None else member.head,
            1.0 if member is None else member.scale,
            recipe=self.asked.to_toml(),
            start=encode(self.accounts.start).data,
            ledger=encode(plain(ledger)).data,
        )

    def take(self, identity: str, client: int | None, report: Report) -> None:
        """Admit the node that sent a report; raise a WireError if it cannot take part."""
        if report.status != DONE:
            raise WireError(f"it cannot take part: {quoted(report.reason)}")
        self._require_inputs(report.inputs)
        if client is None:
            self._admit(identity, report)
        elif self.asked.recipe.algorithm.addresses():
            like = self.accounts.fresh.address
            self.accounts.set_address(client, decode_alike("address", report.address, like, usual_bytes(like)))
        if self.database.fact("inputs") is None:
            self.database.note("inputs", report.inputs)

    def _require_inputs(self, kind: str) -> None:
        """Refuse 8-bit inputs, which models see as numbers from 0 to 1, beside inputs of another scale."""
        expected = self.database.fact("inputs") or (NUMBERS if kind == NUMBERS else EIGHT_BIT)
        if kind != expected:
            words = {EIGHT_BIT: "8-bit", NUMBERS: "not 8-bit"}
            raise WireError(
                f"its inputs are {words.get(kind, quoted(kind))}, but those of the first node are {words[expected]}; "
                "give all nodes inputs of one kind, and start a new run if the first node's kind is wrong"
            )

    def _admit(self, identity: str, report: Report) -> None:
        """Make an unknown node the client whose number it claims."""
        number, member = report.client, self.accounts.members.get(report.client)
        if why := self._why_not(identity, report, member):
            raise WireError(f"it says it is client {number}, {why}")
        newcomer = Enrolled(number, identity, report.examples, first_head(self.run, number))
        if member is not None:
            self.accounts.bind(number, identity, report.examples)
        elif self.begun:
            self._newcomers[number] = newcomer
        else:
            self.accounts.join(newcomer)
            self._begin_when_complete()

    def _why_not(self, identity: str, report: Report, member: Enrolled | None) -> str | None:
        """Return why a node cannot be the client that it says it is; None if it can."""
        number, examples = report.client, report.examples
        if not (0 <= number <= MAX_CLIENT_NUMBER and 0 < examples <= MAX_EXAMPLES):
            return f"but no client can have this number and {examples} examples"
        if self.asked.options.keys is not None and (why := self._why_key_differs(identity, number)):
            return why
        if number in self._newcomers or (member is not None and member.identity is not None):
            return "which is another node; give this node another number, or release the number if a node was replaced"
        if member is None and self.begun and not self.asked.options.joining:
            return "which cannot join after the start of the run, because joining = false"
        return None

    def _why_key_differs(self, identity: str, number: int) -> str | None:
        """Return why a node's key is not the registered key of a client; None if it is."""
        from fedslr.deploy import keys  # needs cryptography, which is installed with Flower

        try:
            registered = keys.registered_key(Path(str(self.asked.options.keys)), number)
        except FedslrError as error:
            return f"whose key is not registered: {error}"
        return None if digest(registered) == identity else "which has another key"

    def _begin_when_complete(self) -> None:
        if not self.begun and len(self.accounts.members) >= self.asked.recipe.data.clients:
            self.database.note("begun", True)

    def change_members(self) -> None:
        """Let newcomers join; let the clients leave that were asked to."""
        self.accounts.reread_members()
        for newcomer in self._newcomers.values():
            self.accounts.join(newcomer)
            self.say(f"client {newcomer.number} joined; the federation has {len(self.accounts.members)} clients")
        self._newcomers.clear()
        for number in [m.number for m in self.accounts.members.values() if m.leaving]:
            self.accounts.leave(number)
            self.say(f"client {number} left; the federation has {len(self.accounts.members)} clients")
