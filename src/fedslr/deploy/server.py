"""The server of a deployed federation. It samples, asks, validates, counts and commits; nothing here knows Flower.

A round is tried until enough uploads came before its deadline. Nothing of it exists until the one transaction that ends
it; then every upload in it is counted for good, and the next order to its node says so. Whatever a node sends is looked
at before it counts: what is wrong is said and left out, and the round goes on with the others.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from fedslr.algorithms import naming
from fedslr.channel import encoding, layout, measuring
from fedslr.channel.model_size import Sizes, parameters
from fedslr.core import factored, schema, seeds, tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, TakenError, WireError
from fedslr.core.states import plain, restore
from fedslr.core.tree import Tree
from fedslr.data.own import DEPLOYED
from fedslr.deploy import options
from fedslr.deploy.ledger import Counted, Ledger, Member
from fedslr.deploy.messages import (
    ANYBODY,
    DONE,
    EIGHT_BIT,
    ENROL,
    EVALUATE,
    LOST,
    NUMBERS,
    TRAIN,
    Order,
    Report,
    digest,
    first_head,
    next_head,
    quoted,
)
from fedslr.deploy.options import Deployment
from fedslr.engine import contract, selection
from fedslr.engine.settings import DEFAULT_COHORT
from fedslr.report.page import write_report
from fedslr.run.resumption import difference, fixed_on_resume
from fedslr.run.summary import Figures, full_ranks, summarize
from fedslr.storage.client_store import size
from fedslr.storage.record import Record
from fedslr.storage.run_folder import RunFolder
from fedslr.storage.statistics import Evaluation

FAILURE = "failure.txt"
"""In the run folder: why the last start of the server ended before the run did."""
PHASES = ("train", "aggregate", "evaluate")
GREETING = 60
"""Seconds after which a node that could not take part is asked again."""
LINGERING = 60.0
"""Seconds that a new server waits for the one before it to leave the run folder."""
STEPS = ("opened", "received", "closing", "committed", "evaluated")
"""The moments of a server's work, for those who want to look at one."""


class Post(Protocol):
    """Who carries the messages."""

    def nodes(self) -> Iterable[str]:
        """The identities of all nodes that can be reached."""
        ...

    def send(self, identity: str, order: Order) -> None:
        """Have an order delivered; the last one to a node replaces those before it."""
        ...

    def receive(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Whatever came in since: who sent it, and its fields. It may wait a little where there is nothing."""
        ...


class Upload(NamedTuple):
    """An upload that will count."""

    tree: Tree
    address: Tree
    digest: str
    share: float
    size: layout.Size


@dataclass
class Question:
    """What was asked of some clients, and what they answered."""

    kind: str
    round: int
    attempt: int
    waiting: set[int]
    record: Record | None = None
    uploads: dict[int, Upload] = field(default_factory=dict)
    evaluations: dict[int, Report] = field(default_factory=dict)
    enrolled: set[int] = field(default_factory=set)
    """Clients that had lost their books."""

    def is_answered_by(self, report: Report) -> bool:
        return (report.kind, report.round, report.attempt) == (self.kind, self.round, self.attempt)


class _Stale(WireError):
    """A message that is not an answer to what was last asked."""


class Coordinator:
    """A federation's server, from its run folder."""

    def __init__(
        self,
        folder: RunFolder,
        asked: Deployment | None,
        post: Post,
        say: Callable[[str], None] = lambda text: None,
        at: Callable[[str], None] = lambda step: None,
        clock: Callable[[], float] = time.monotonic,
        registered: Callable[[int], str | None] = lambda number: None,
    ) -> None:
        self.folder, self.post, self.say, self.at, self.clock = folder, post, say, at, clock
        self.registered = registered
        self.ledger = Ledger(folder.path)
        self.asked = self._same_run(asked) if self.ledger.exists else self._first_run(asked)
        self.options, self.settings = self.asked.options, self.asked.recipe.settings
        self.algorithm: Algorithm[Any, Any] = self.asked.recipe.algorithm
        self.select = selection.find(self.settings.selection)
        self.run = str(self.ledger.fact("run"))
        self.done = int(self.ledger.fact("done"))
        self.start = self.ledger.tree("start")
        self.fresh = self.algorithm.init_client(self.start)
        fresh_server = self.algorithm.init_server(self.start, 1)
        self.server = restore(type(fresh_server), self.ledger.tree("server"))
        self.members = self.ledger.members()
        self.seconds = {**dict.fromkeys(PHASES, 0.0), **(self.ledger.fact("seconds") or {})}
        self.begun = self.done > 0 or len(self.members) >= self.num_clients
        self.notes: dict[int, str] = {}
        self.refused: deque[str] = deque(maxlen=1000)
        """What was wrong with the last messages that did not count."""
        self.open: Question | None = None
        self._newcomers: dict[int, tuple[str, int]] = {}
        self._greeted: dict[str, float] = {}
        self._announce()
        self._restore_records()

    # --- the run and its folder --------------------------------------------------------------------------------------

    def _first_run(self, asked: Deployment | None) -> Deployment:
        if asked is None:
            raise FedslrError(f"resume: {self.folder.path} holds no federation to resume")
        selection.find(asked.recipe.settings.selection)
        start = asked.task().params()
        num_clients = asked.recipe.data.clients
        method = asked.recipe.algorithm
        with naming.mistakes(method):
            server = method.init_server(start, num_clients)
            contract.require_states(server, method.init_client(start))
        start = factored.to_device(start, "cpu")
        server = factored.to_device(plain(server), "cpu")
        self.ledger.create(secrets.token_hex(8), asked.to_toml(), start, server, num_clients)
        return asked

    def _same_run(self, asked: Deployment | None) -> Deployment:
        if asked is None:
            return options.from_text(self.ledger.fact("recipe"))
        same_run(self.ledger, asked, self.folder.path)
        self.ledger.change_recipe(asked.to_toml())
        return asked

    def _restore_records(self) -> None:
        """metrics.jsonl says what the ledger says; the last line waits for its evaluation."""
        self.folder.write_config(self.asked.recipe.to_toml())
        self.folder.rewind(None)
        for record in self.ledger.records()[: self.done if self._is_evaluated() else self.done - 1]:
            self.folder.append(Record(**record))

    def _is_evaluated(self) -> bool:
        return self.ledger.is_evaluated(self.done) or not self.settings.is_evaluated(self.done)

    @property
    def num_clients(self) -> int:
        return int(self.ledger.fact("num_clients"))

    # --- the walk of a run -------------------------------------------------------------------------------------------

    def rounds(self) -> Iterator[Record]:
        """Run what is left of the run, a record for every finished round."""
        self._gather()
        if not self._is_evaluated():
            yield self._evaluate()
        while self.done < self.settings.rounds:
            self._greet()
            self._change_members()
            record = self._round()
            yield self._evaluate() if self.settings.is_evaluated(self.done) else self._note(record)

    def _note(self, record: Record) -> Record:
        self.folder.append(record)
        return record

    def _gather(self) -> None:
        """Before the first round, all clients have to be there; later, as many as a round needs."""
        until = self.clock() + self.options.deadline * self.options.attempts
        while not self.begun:
            self._greet()
            self._listen()
            if not self.begun and self.clock() > until:
                raise FedslrError(
                    f"clients: {len(self.members)} of {self.num_clients} came; start the other nodes, then resume"
                )

    def _greet(self) -> None:
        """Ask every node that is not known which client it is."""
        known = {m.identity for m in self.members.values()} | {who for who, _ in self._newcomers.values()}
        known |= set(self.ledger.removed())
        for identity in self.post.nodes():
            last = self._greeted.get(identity)
            if identity not in known and (last is None or self.clock() > last + GREETING):
                self._greeted[identity] = self.clock()
                self.post.send(identity, self._enrol_order(None))

    def _change_members(self) -> None:
        """Between rounds: new clients begin with nothing, others leave with their share of what the server mirrors."""
        self.members = self.ledger.members()
        for number, (identity, examples) in self._newcomers.items():
            member = Member(number, identity, examples, first_head(self.run, number), 0.0, None, False)
            self._resize(len(self.members) + 1)
            self.ledger.add(member, plain(self.server), self.num_clients + 1)
            self.members = self.ledger.members()
            self.say(f"client {number} joined; {len(self.members)} are here")
        for member in [m for m in self.members.values() if m.leaving]:
            if len(self.members) == 1:
                self.say(f"client {member.number} is the last one and stays; a federation needs one")
                break
            self._resize(len(self.members) - 1, self._mirrored(member))
            self.ledger.remove(member.number, plain(self.server), self.num_clients - 1)
            self.members = self.ledger.members()
            self.say(f"client {member.number} left; {len(self.members)} are here")
        self._newcomers.clear()

    def _resize(self, num_clients: int, leaving: Any = None) -> None:
        self.server = self.algorithm.resize(self.server, num_clients, leaving)
        self._announce()

    # --- a round -----------------------------------------------------------------------------------------------------

    def _round(self) -> Record:
        before = dict(self.seconds)
        record = Record(round=self.done + 1, lr=self.settings.round(self.done).lr, clients=[])
        sampled = self._sample()
        size = len(sampled)
        for _ in range(self.options.attempts):
            # Fewer than were drawn are left only where clients leave.
            needed = self.options.needed(min(size, len(sampled)))
            with self._timed("train"):
                asked = self._ask(TRAIN, self.ledger.next_attempt(), sampled, record, size)
            if len(asked.uploads) >= needed:
                return self._close(asked, sampled, record, before)
            sampled = self._and_others(sampled, len(sampled) - len(asked.uploads))
            came = f"{len(asked.uploads)} of {needed} uploads came in time"
            self.say(f"round {self.done + 1}: {came}; asking clients {sampled}")
        raise FedslrError(
            f"round {self.done + 1}: fewer than {needed} uploads in {self.options.attempts} attempts from clients "
            f"{sampled}; the log says what became of each; resume when they are back and well"
        )

    def _and_others(self, sampled: list[int], count: int) -> list[int]:
        """Whom to ask next: the same, whose uploads may be made by now, and so many others who are here."""
        here, members = set(self.post.nodes()), self.ledger.members()
        stay = [n for n in self.members if n in members and not members[n].leaving]
        others = [n for n in stay if n not in sampled and self.members[n].identity in here]
        drawn = seeds.generator(seeds.COHORT, self.settings.seed, self.done, len(sampled)).permutation(len(others))
        chosen = {*sampled, *(others[i] for i in drawn[:count])}
        return [n for n in stay if n in chosen] or sampled

    def _sample(self) -> list[int]:
        numbers = list(self.members)
        size = min(self.settings.clients_per_round or DEFAULT_COHORT, len(numbers))
        examples = [m.examples for m in self.members.values()]
        return [numbers[i] for i in selection.draw(self.select, size, examples, self.settings.seed, self.done)]

    def _ask(
        self, kind: str, attempt: int, clients: list[int], record: Record | None = None, enough: float = math.inf
    ) -> Question:
        """Send every client its order and listen until all or enough have answered, or the deadline is over."""
        question = self.open = Question(kind, self.done, attempt, set(clients), record)
        for client in clients:
            self._order(client, question)
        if kind == EVALUATE:
            # A round needs its clients; an evaluation does without those who are not there.
            here = set(self.post.nodes())
            question.waiting = {c for c in clients if self.members[c].identity in here}
        self.at("opened")
        until = self.clock() + self.options.deadline
        while question.waiting and len(question.uploads) < enough and self.clock() < until:
            self._greet()
            self._listen()
        self.open = None
        return question

    def _listen(self) -> None:
        for identity, fields in self.post.receive():
            self.receive(identity, fields)

    def _close(self, asked: Question, sampled: list[int], record: Record, before: dict[str, float]) -> Record:
        """Aggregate what came, in the order of the cohort, and commit."""
        self.at("closing")
        counted = [c for c in sampled if c in asked.uploads]
        with self._timed("aggregate"), naming.mistakes(self.algorithm):
            server, encoded = self._aggregate([(c, asked.uploads[c]) for c in counted])
            entries = [self._entry(c, asked) for c in counted]
        record.clients = counted
        record.missing = [c for c in sampled if c not in asked.uploads] or None
        record.rank = self.algorithm.ranks(server)
        record.seconds_by = {p: round(self.seconds[p] - before[p], 6) for p in PHASES}
        record.seconds = round(sum(record.seconds_by.values()), 6)
        self.ledger.commit(self.done + 1, plain(server), entries, _line(record), self.seconds)
        self.at("committed")
        self.done += 1
        self.server, self.members = server, self.ledger.members()
        self.ledger.forget_refusals(*(_known(c, self.members[c].identity or "") for c in counted))
        self._announce(encoded)
        return record

    def _aggregate(self, uploads: list[tuple[int, Upload]]) -> tuple[Any, encoding.Message]:
        """The server after the round, and what it then has to say."""
        mean = tree.Mean()
        weights = contract.checked_weights([self.algorithm.weight(self.members[c].examples) for c, _ in uploads])
        for (_, upload), weight in zip(uploads, weights, strict=True):
            counted = upload.tree if upload.share == 1 else _scaled(upload.tree, upload.share)
            mean.add(counted, weight)
        try:
            # Noise that a method adds is drawn anew: nodes know the seed, and could take away what follows from it.
            made = self.algorithm.aggregate(self.server, mean.value(), len(uploads))
            server = contract.checked_server(made, self.server, self.start)
            return server, _encode(contract.checked_broadcast(self.algorithm.broadcast(server)))
        except (WireError, LinAlgError) as error:
            why = str(error).splitlines()[0]
            lower = contract.what_to_lower(self.algorithm)
            raise FedslrError(
                f"round {self.done + 1}: the global model diverged: {why}; lower {lower}, or set norm_bound"
            ) from error

    def _entry(self, client: int, asked: Question) -> Counted:
        """An upload in the books: its place in the client's chain, and what the client now has to have."""
        member, upload = self.members[client], asked.uploads[client]
        head = next_head(member.head, asked.round, asked.attempt, upload.digest, upload.share)
        account: Tree = {}
        if self.algorithm.ledger or self.algorithm.addressing:
            state = self.algorithm.book(self._mirrored(member), upload.tree, upload.share)
            account = {name: getattr(state, name) for name in self.algorithm.ledger} | upload.address
        return Counted(client, asked.round, asked.attempt, upload.digest, upload.share, head, account)

    def _mirrored(self, member: Member) -> Any:
        """A client with what the server mirrors of it; all else is as it began."""
        account = self.ledger.account(member)
        return self.fresh._replace(**account) if account else self.fresh

    def _announce(self, encoded: encoding.Message | None = None) -> None:
        """What is sent to all, and what they make of it."""
        self.broadcast = self.algorithm.broadcast(self.server)
        self.encoded = encoded or _encode(self.broadcast)
        self.payload = factored.unfold(encoding.decode(self.encoded.data)) if self.encoded.data else {}

    # --- orders ------------------------------------------------------------------------------------------------------

    def _order(self, client: int, question: Question) -> None:
        """Send a client what is asked of it, and what was counted of it."""
        member, message = self.members[client], self.encoded
        if member.identity is None:
            return
        if question.kind == TRAIN:
            # A client's account is as large as a model: it is read only for those who look at it.
            known = self._mirrored(member) if self.algorithm.addressing else self.fresh
            mine = self.algorithm.addressed(self.broadcast, known)
            message = self.encoded if mine is self.broadcast else _encode(mine)
        if question.record is not None:
            question.record.count_down(message.size)
        order = Order(
            question.kind,
            self.run,
            client,
            question.round,
            question.attempt,
            member.head,
            member.share,
            message.data,
            self.notes.pop(client, ""),
        )
        self.post.send(member.identity, order)

    def _enrol_order(self, member: Member | None) -> Order:
        """For a node nobody knows, or for a known client that lost its books."""
        account = {} if member is None else self.ledger.account(member)
        return Order(
            ENROL,
            self.run,
            ANYBODY if member is None else member.number,
            self.done,
            0,
            "" if member is None else member.head,
            0.0 if member is None else member.share,
            recipe=self.asked.to_toml(),
            start=_encode(self.start).data,
            account=_encode(account).data,
        )

    # --- reports -----------------------------------------------------------------------------------------------------

    def receive(self, identity: str, fields: Mapping[str, Any]) -> None:
        """Take a message for what it is; one that cannot count is said and left out."""
        client = next((m.number for m in self.members.values() if m.identity == identity), None)
        try:
            report = Report.from_fields(fields)
            if report.run != self.run:
                raise _Stale("it is of another run")
            if report.kind == ENROL:
                self._take_enrolment(identity, client, report)
            else:
                self._take(identity, client, report)
        except WireError as error:
            who = _unknown(identity) if client is None else _known(client, identity)
            self.refused.append(f"{who}: {error}")
            self.say(f"a message of {who} does not count: {error}")
            if not isinstance(error, _Stale):
                self.ledger.note_refusal(who, self.done + 1, str(error))
                if client is not None:
                    self.notes[client] = str(error)
                    if self.open is not None:
                        self.open.waiting.discard(client)
        self.at("received")

    def _take_enrolment(self, identity: str, client: int | None, report: Report) -> None:
        if client is not None and report.client != client:
            raise WireError(f"it is client {client} but says it is client {report.client}")
        if report.status != DONE:
            raise WireError(f"it cannot take part: {quoted(report.reason)}")
        self._require_inputs(report.inputs)
        if client is None:
            self._admit(identity, report)
            self.ledger.forget_refusals(_unknown(identity))
        if self.ledger.fact("inputs") is None:
            self.ledger.note_inputs(report.inputs)
        if self.open is not None and report.client in self.open.waiting:
            self._order(report.client, self.open)

    def _require_inputs(self, kind: str) -> None:
        """All nodes have 8-bit inputs, which models see as numbers from 0 to 1, or none has: a model has one scale."""
        if kind not in (EIGHT_BIT, NUMBERS):
            raise WireError(f"its inputs are of no known kind: {quoted(kind)}")
        if self.ledger.fact("inputs") not in (None, kind):
            mine, others = ("8-bit", "not") if kind == EIGHT_BIT else ("not 8-bit", "8-bit")
            raise WireError(
                f"its inputs are {mine}, those of the first node are {others}; expected one kind, and a new run if "
                "the first one is wrong"
            )

    def _admit(self, identity: str, report: Report) -> None:
        """A node that nobody knows says which client it is."""
        number = report.client
        if not (0 <= number < 2**31 and 0 < report.examples < 2**40):
            raise WireError(f"there is no client {number} with {report.examples} examples")
        member, expected = self.members.get(number), self.registered(number)
        if expected is not None and expected != identity:
            raise WireError(f"it says it is client {number}, which has another key")
        if member is not None and member.identity is None:
            self.ledger.bind(number, identity, report.examples)
        elif member is not None or number in self._newcomers:
            raise WireError(f"it says it is client {number}, which is another node")
        elif not self.begun:
            first = Member(number, identity, report.examples, first_head(self.run, number), 0.0, None, False)
            self.ledger.add(first)
            self.begun = len(self.members) + 1 >= self.num_clients
        elif self.options.joining:
            self._newcomers[number] = (identity, report.examples)
        else:
            raise WireError(f"it wants to join as client {number}, and joining = false")
        self.members = self.ledger.members()

    def _take(self, identity: str, client: int | None, report: Report) -> None:
        if client is None:
            raise _Stale("nobody knows this node")
        if report.client != client:
            raise WireError(f"it is client {client} but says it is client {report.client}")
        question = self.open
        if question is None or not question.is_answered_by(report):
            raise _Stale(f"it answers round {report.round + 1}, attempt {report.attempt}, which is not open")
        if client not in question.waiting:
            raise _Stale("it was answered already, or not asked")
        if report.status == LOST and client not in question.enrolled:
            question.enrolled.add(client)
            self.say(f"client {client} lost its books ({quoted(report.reason)}); it is enrolled again")
            self.post.send(identity, self._enrol_order(self.members[client]))
            return
        if report.status != DONE:
            raise WireError(f"it could not do its work: {quoted(report.reason)}")
        if report.kind == TRAIN:
            upload = question.uploads[client] = self._examine(report)
            if question.record is not None:
                question.record.count_up(upload.size)
        else:
            question.evaluations[client] = _plausible(report)
        question.waiting.discard(client)

    def _examine(self, report: Report) -> Upload:
        """The upload of a report, if it is one that can be counted."""
        limit, length = self._max_bytes(), len(report.payload) + len(report.address)
        if length > limit:
            raise WireError(f"it has {length} bytes, more than the {limit} allowed")
        if digest(report.payload) != report.digest:
            raise WireError("its digest does not match")
        upload = self._decode("upload", report.payload, self.payload)
        told = {name: getattr(self.fresh, name) for name in self.algorithm.addressing}
        address = self._decode("address", report.address, told)
        numbers = measuring.measure(upload).numbers if upload else 0
        return Upload(upload, address, report.digest, self._share(upload), layout.Size(len(report.payload), numbers))

    def _decode(self, what: str, data: bytes, like: Tree) -> Tree:
        numbers = 4 * sum(max(x.numel(), 1) for x in tree.leaves(like))
        found = encoding.decode(data, max_bytes=self._max_bytes(), max_numbers=numbers) if data else {}
        factored.require_alike(found, like, what)
        return factored.unfold(found)

    def _max_bytes(self) -> int:
        if self.options.max_bytes is not None:
            return schema.in_bytes(self.options.max_bytes) or 0
        return 2 * size(self.payload) + 2**16

    def _share(self, upload: Tree) -> float:
        """How much of an upload counts: all, unless it is longer than what is allowed."""
        bound = self.options.norm_bound
        if bound is None or not upload:
            return 1.0
        return min(1.0, bound / max(float(tree.norm(tree.map(Tensor.double, upload))), 1e-300))

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self) -> Record:
        """Every client's own and the global model on its own test data, as far as the clients can be reached."""
        record = Record(**self.ledger.records()[-1])
        numbers = list(self.members)
        chosen = selection.evaluated(self.settings.evaluate_clients, len(numbers), self.settings.seed)
        asked = [numbers[i] for i in chosen]
        before = self.seconds["evaluate"]
        with self._timed("evaluate"):
            answers = self._ask(EVALUATE, 0, asked).evaluations
        found = [answers.get(c) for c in asked]
        personal = [None if r is None or r.accuracy_personal < 0 else r.accuracy_personal for r in found]
        shared = [None if r is None or r.accuracy_global < 0 else r.accuracy_global for r in found]
        has_global = self.algorithm.received_model(self.payload) is not None
        everybody = asked == list(range(len(numbers)))
        record.add_evaluation(Evaluation(shared if has_global else None, personal), None if everybody else asked)
        record.seconds_by["evaluate"] = round(self.seconds["evaluate"] - before, 6)
        record.seconds = round(sum(record.seconds_by.values()), 6)
        sizes = [r.parameters for r in found if r is not None]
        record.add_sizes(self._sizes(sizes))
        self.ledger.evaluated(self.done, _line(record), sizes)
        self.at("evaluated")
        return self._note(record)

    def sizes(self) -> Sizes:
        """Numbers that the models of the last evaluation need."""
        return self._sizes(list(self.ledger.fact("parameters") or [0]))

    def _sizes(self, personal: list[int]) -> Sizes:
        dense = sum(x.numel() for x in self.start.values())
        return Sizes(dense, parameters(self.algorithm.shared(self.broadcast)), personal)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begun


def _known(client: int, identity: str) -> str:
    return f"client {client} ({identity[:16]})"


def _unknown(identity: str) -> str:
    return f"an unknown node ({identity[:16]})"


def _encode(payload: Tree) -> encoding.Message:
    return encoding.encode(payload) if payload else encoding.NOTHING


def _scaled(upload: Tree, share: float) -> Tree:
    return tree.map(lambda x: x * share, upload)


def _line(record: Record) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if v is not None}


def _plausible(report: Report) -> Report:
    for value in (report.accuracy_global, report.accuracy_personal):
        if not (value == -1 or 0 <= value <= 1):
            raise WireError(f"an accuracy of {value:g} is none")
    if report.parameters < 0:
        raise WireError("a model has no negative number of parameters")
    return report


def same_run(ledger: Ledger, asked: Deployment, path: Path) -> None:
    """The run in the folder; what is asked for may differ in what changes no round already made."""
    kept = options.from_text(ledger.fact("recipe"))
    fixed = fixed_on_resume(kept.recipe.algorithm)
    if asked.recipe.settings.rounds < (done := ledger.fact("done")):
        raise FedslrError(f"rounds: got {asked.recipe.settings.rounds}, but {done} are done in {path}")
    if changed := difference(kept.recipe.to_toml(), asked.recipe.to_toml(), asked.recipe.algorithm.name, fixed):
        raise FedslrError(f"resume: this is not the run in {path}: {changed}")
    if kept.options.shape != asked.options.shape or kept.options.classes != asked.options.classes:
        raise FedslrError(f"resume: this is not the run in {path}: inputs or classes changed")


def open_coordinator(
    path: Path, asked: Deployment | None, post: Post, patience: float = 0.0, **options: Any
) -> Coordinator:
    """The federation of a run folder, which nobody else has open, at the latest after some seconds."""
    if asked is None and not path.is_dir():
        raise FedslrError(f"resume: {path} holds no federation to resume")
    folder = _taken_over(path, patience, options.get("say", lambda text: None))
    try:
        return Coordinator(folder, asked, post, **options)
    except BaseException:
        folder.close()
        raise


def _taken_over(path: Path, patience: float, say: Callable[[str], None]) -> RunFolder:
    """A run folder, as soon as the server before has left it: one whose link is gone may take seconds to notice."""
    until, told = time.monotonic() + patience, False
    while True:
        try:
            return RunFolder(path)
        except TakenError:
            if time.monotonic() >= until:
                raise
        if not told:
            say(f"another server is still in {path}; waiting up to {patience:g} seconds for it to end")
        told = True
        time.sleep(0.2)


def finish(coordinator: Coordinator) -> dict[str, Any]:
    """The summary and the report of a federation that is done."""
    records, asked = coordinator.ledger.records(), coordinator.asked
    run = Figures(
        asked.recipe.algorithm.name,
        DEPLOYED,
        len(coordinator.members),
        coordinator.done,
        asked.recipe.settings.seed,
        coordinator.sizes(),
        coordinator.seconds,
        full_ranks(coordinator.start),
    )
    summary = summarize(run, records, rerunnable=False)
    coordinator.folder.write_summary(summary)
    write_report([coordinator.folder.path], coordinator.folder.path / "report.html")
    return summary
