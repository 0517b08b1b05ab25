"""The server's exchange of messages with the nodes: it sends orders, and receives and checks reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedslr.core.errors import FedslrError, WireError
from fedslr.deploy.accounts import Accounts
from fedslr.deploy.enrolment import Enrolment
from fedslr.deploy.messages import DONE, ENROL, EVALUATE, LOST, TRAIN, Order, Report, quoted
from fedslr.deploy.options import Deployment
from fedslr.deploy.scores import NodeScores, unpack
from fedslr.deploy.uploads import Upload, examine
from fedslr.storage.record import Record


class Post(Protocol):
    """The carrier of the messages."""

    def nodes(self) -> Iterable[str]:
        """Return the identities of all nodes that can be reached."""
        ...

    def send(self, identity: str, order: Order) -> None:
        """Deliver an order; a later order to the same node replaces it."""
        ...

    def receive(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the sender and the fields of every message that arrived since the last call; wait a little for one."""
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
    evaluations: dict[int, NodeScores] = field(default_factory=dict)
    enrolled: set[int] = field(default_factory=set)
    """The clients that had lost their state and were enrolled again."""

    def is_open_to(self, client: int, report: Report) -> bool:
        """Return whether this question still waits for a client's report."""
        asked, answered = (self.kind, self.round, self.attempt), (report.kind, report.round, report.attempt)
        return client in self.waiting and asked == answered


class _Stale(WireError):
    """A message that does not answer the server's last question."""


class Exchange:
    """Sends orders to the nodes and collects their answers."""

    def __init__(
        self, accounts: Accounts, asked: Deployment, post: Post, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.accounts, self.database, self.asked = accounts, accounts.database, asked
        self.post, self.say, self.clock = post, say, clock
        self.enrolment = Enrolment(accounts, asked, say)
        self.scorer = asked.scorer()
        self.run = str(self.database.fact("run"))
        self._notes: dict[int, str] = {}
        """By client: the reason why its last message was refused, for its next order."""
        self._open: Question | None = None

    # --- orders -------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until all clients of the recipe have enrolled, unless the run has begun."""
        until = self.clock() + self.asked.options.deadline * self.asked.options.attempts
        while not self.enrolment.begun:
            self.greet()
            self._listen()
            if not self.enrolment.begun and self.clock() > until:
                enrolled, awaited = len(self.accounts.members), self.asked.recipe.data.clients
                raise FedslrError(
                    f"data.clients: {enrolled} of {awaited} clients enrolled; start the other nodes, then resume"
                )

    def greet(self) -> None:
        """Ask every unknown node for its client number."""
        unknown = self.enrolment.unknown(self.post.nodes(), self.clock())
        if unknown:
            order = self.enrolment.order()
            for identity in unknown:
                self.post.send(identity, order)

    def ask(self, question: Question, clients: Sequence[int], enough: float = math.inf) -> Question:
        """Send every client its order; listen until all or enough clients have answered, or until the deadline."""
        self._open = question
        question.waiting = set(clients)
        for client in clients:
            self._order(client, question)
        if question.kind == EVALUATE:
            # An evaluation leaves out the clients that cannot be reached; a round waits for them.
            reachable = set(self.post.nodes())
            question.waiting = {c for c in clients if self.accounts.members[c].identity in reachable}
        until = self.clock() + self.asked.options.deadline
        while question.waiting and len(question.uploads) < enough and self.clock() < until:
            self.greet()
            self._listen()
        self._open = None
        return question

    def _order(self, client: int, question: Question) -> None:
        """Send a client an order, whose head also shows which of its uploads was counted last."""
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
        """Process a message; refuse a message that cannot count, and report why."""
        client = self.enrolment.client_of(identity)
        try:
            report = Report.from_fields(fields)
            if report.run != self.run:
                raise _Stale("it belongs to another run")
            if client is not None and report.client != client:
                raise WireError(f"it is client {client} but says it is client {report.client}")
            if report.kind == ENROL:
                self._take_enrolment(identity, client, report)
            else:
                self._take_answer(identity, client, report)
        except WireError as error:
            self._refuse(identity, client, error)

    def _refuse(self, identity: str, client: int | None, error: WireError) -> None:
        sender = sender_name(client, identity)
        self.say(f"the server refused a message from {sender}: {error}")
        if isinstance(error, _Stale):
            return
        self.database.note_refusal(sender, int(self.database.fact("done")) + 1, str(error))
        if client is not None:
            self._notes[client] = str(error)
            if self._open is not None:
                self._open.waiting.discard(client)

    def _take_enrolment(self, identity: str, client: int | None, report: Report) -> None:
        self.enrolment.take(identity, client, report)
        if client is None:
            self.database.forget_refusals(sender_name(None, identity))
        if self._open is not None and report.client in self._open.waiting:
            self._order(report.client, self._open)

    def _take_answer(self, identity: str, client: int | None, report: Report) -> None:
        question = self._open
        if client is None or question is None or not question.is_open_to(client, report):
            raise _Stale(f"it answers round {report.round + 1}, attempt {report.attempt}, which is not open to it")
        if report.status == LOST and client not in question.enrolled:
            question.enrolled.add(client)
            self.say(f"client {client} lost its state ({quoted(report.reason)}); the server enrols it again")
            self.post.send(identity, self.enrolment.order(client))
            return
        if report.status != DONE:
            raise WireError(f"the node failed: {quoted(report.reason)}")
        if report.kind == TRAIN:
            upload = question.uploads[client] = self._examine(client, report)
            question.record.count_up(upload.size)
        else:
            question.evaluations[client] = self._scores(report)
        question.waiting.discard(client)

    def _scores(self, report: Report) -> NodeScores:
        """Return the scores of an evaluation; raise a WireError if its figures are impossible."""
        if report.parameters < 0:
            raise WireError(f"its {report.parameters} parameters are impossible")
        found = unpack(report.scores, self.scorer.metrics, self.accounts.algorithm.has_global_model)
        return NodeScores(*found, report.parameters)

    def _examine(self, client: int, report: Report) -> Upload:
        options, accounts = self.asked.options, self.accounts
        form = accounts.broadcast.form(client, accounts.address(client))
        return examine(
            report, accounts.algorithm, form, accounts.fresh.address, options.upload_bytes, options.norm_bound
        )


def sender_name(client: int | None, identity: str) -> str:
    """Return the name of a sender in log lines and errors."""
    return f"{'an unknown node' if client is None else f'client {client}'} ({identity[:16]})"
