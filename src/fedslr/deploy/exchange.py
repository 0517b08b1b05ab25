"""The server's exchange of messages with the nodes: orders go out, reports come in and are checked."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedslr.core.errors import FedslrError, WireError
from fedslr.deploy.accounts import Accounts
from fedslr.deploy.enrolment import Enrolment
from fedslr.deploy.messages import DONE, ENROL, EVALUATE, LOST, TRAIN, Order, Report, quoted
from fedslr.deploy.options import Deployment
from fedslr.deploy.uploads import Upload, examine
from fedslr.storage.record import Record

MAX_REFUSALS = 1000
"""Refusals that a server remembers."""


class Post(Protocol):
    """The carrier of the messages."""

    def nodes(self) -> Iterable[str]:
        """Return the identities of all nodes that can be reached."""
        ...

    def send(self, identity: str, order: Order) -> None:
        """Have an order delivered; a later order to the same node replaces it."""
        ...

    def receive(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the senders and fields of the messages that came in since; wait a little if there are none."""
        ...


@dataclass
class Question:
    """An order to some clients, and their answers so far."""

    kind: str
    round: int
    attempt: int
    record: Record
    waiting: set[int] = field(default_factory=set)
    uploads: dict[int, Upload] = field(default_factory=dict)
    evaluations: dict[int, Report] = field(default_factory=dict)
    enrolled: set[int] = field(default_factory=set)
    """Clients that had lost their state."""

    def is_open_to(self, client: int, report: Report) -> bool:
        """Return whether a client's report answers this question."""
        asked, answered = (self.kind, self.round, self.attempt), (report.kind, report.round, report.attempt)
        return client in self.waiting and asked == answered


class _Stale(WireError):
    """A message that does not answer what the server asked last."""


class Exchange:
    """Sends orders to the nodes and collects their answers."""

    def __init__(
        self, accounts: Accounts, asked: Deployment, post: Post, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.accounts, self.ledger, self.asked = accounts, accounts.ledger, asked
        self.post, self.say, self.clock = post, say, clock
        self.enrolment = Enrolment(accounts, asked, say)
        self.run = str(self.ledger.fact("run"))
        self.refused: deque[str] = deque(maxlen=MAX_REFUSALS)
        """Why the last messages were refused."""
        self._notes: dict[int, str] = {}
        """For the next order to a client: why its last message was refused."""
        self._open: Question | None = None

    # --- orders -------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until all clients of the recipe have enrolled, unless the run has begun."""
        until = self.clock() + self.asked.options.deadline * self.asked.options.attempts
        while not self.enrolment.begun:
            self.greet()
            self._listen()
            if not self.enrolment.begun and self.clock() > until:
                came, awaited = len(self.accounts.members), self.asked.recipe.data.clients
                raise FedslrError(f"clients: {came} of {awaited} came; start the other nodes, then resume")

    def greet(self) -> None:
        """Ask every unknown node which client it is."""
        unknown = self.enrolment.unknown(self.post.nodes(), self.clock())
        if unknown:
            order = self.enrolment.order()
            for identity in unknown:
                self.post.send(identity, order)

    def ask(self, question: Question, clients: Sequence[int], enough: float = math.inf) -> Question:
        """Send every client its order; listen until all or enough have answered, or the deadline is over."""
        self._open = question
        question.waiting = set(clients)
        for client in clients:
            self._order(client, question)
        if question.kind == EVALUATE:
            # A round needs its clients. An evaluation does without those that cannot be reached.
            here = set(self.post.nodes())
            question.waiting = {c for c in clients if self.accounts.members[c].identity in here}
        until = self.clock() + self.asked.options.deadline
        while question.waiting and len(question.uploads) < enough and self.clock() < until:
            self.greet()
            self._listen()
        self._open = None
        return question

    def _order(self, client: int, question: Question) -> None:
        """Send a client an order, which also says which of its uploads was counted last."""
        member = self.accounts.members[client]
        if member.identity is None:
            return
        message = self.accounts.broadcast.message(client, self.accounts.address(client))
        if question.kind == TRAIN:
            question.record.count_down(message.size)
        order = Order(
            question.kind,
            self.run,
            client,
            question.round,
            question.attempt,
            member.head,
            member.scale,
            message.data,
            self.accounts.broadcast.shared_message().data if question.kind == EVALUATE else b"",
            self._notes.pop(client, ""),
        )
        self.post.send(member.identity, order)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for identity, fields in self.post.receive():
            self.receive(identity, fields)

    def receive(self, identity: str, fields: Mapping[str, Any]) -> None:
        """Take a message; refuse one that cannot count, and say why."""
        client = self.enrolment.client_of(identity)
        try:
            report = Report.from_fields(fields)
            if report.run != self.run:
                raise _Stale("it is of another run")
            if client is not None and report.client != client:
                raise WireError(f"it is client {client} but says it is client {report.client}")
            if report.kind == ENROL:
                self._take_enrolment(identity, client, report)
            else:
                self._take_answer(identity, client, report)
        except WireError as error:
            self._refuse(identity, client, error)

    def _refuse(self, identity: str, client: int | None, error: WireError) -> None:
        who = sender_name(client, identity)
        self.refused.append(f"{who}: {error}")
        self.say(f"a message of {who} does not count: {error}")
        if isinstance(error, _Stale):
            return
        self.ledger.note_refusal(who, int(self.ledger.fact("done")) + 1, str(error))
        if client is not None:
            self._notes[client] = str(error)
            if self._open is not None:
                self._open.waiting.discard(client)

    def _take_enrolment(self, identity: str, client: int | None, report: Report) -> None:
        self.enrolment.take(identity, client, report)
        if client is None:
            self.ledger.forget_refusals(sender_name(None, identity))
        if self._open is not None and report.client in self._open.waiting:
            self._order(report.client, self._open)

    def _take_answer(self, identity: str, client: int | None, report: Report) -> None:
        question = self._open
        if client is None or question is None or not question.is_open_to(client, report):
            raise _Stale(f"it answers round {report.round + 1}, attempt {report.attempt}, which is not open to it")
        if report.status == LOST and client not in question.enrolled:
            question.enrolled.add(client)
            self.say(f"client {client} lost its state ({quoted(report.reason)}); it is enrolled again")
            self.post.send(identity, self.enrolment.order(client))
            return
        if report.status != DONE:
            raise WireError(f"it could not do its work: {quoted(report.reason)}")
        if report.kind == TRAIN:
            upload = question.uploads[client] = self._examine(client, report)
            question.record.count_up(upload.size)
        else:
            question.evaluations[client] = _plausible(report)
        question.waiting.discard(client)

    def _examine(self, client: int, report: Report) -> Upload:
        options, accounts = self.asked.options, self.accounts
        form = accounts.broadcast.form(client, accounts.address(client))
        return examine(
            report, accounts.algorithm, form, accounts.fresh.address, options.upload_bytes, options.norm_bound
        )


def sender_name(client: int | None, identity: str) -> str:
    """Return what a sender is called in messages to people."""
    return f"{'an unknown node' if client is None else f'client {client}'} ({identity[:16]})"


def _plausible(report: Report) -> Report:
    """Return a report of an evaluation; raise a WireError if its figures are impossible."""
    accuracies = (report.accuracy_global, report.accuracy_personal)
    if not all(value == -1 or 0 <= value <= 1 for value in accuracies) or report.parameters < 0:
        raise WireError(f"its accuracies {accuracies} or its {report.parameters} parameters are impossible")
    return report
