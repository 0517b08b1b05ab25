"""A node: one client with its own data and its own disk. Orders come in, reports go out; nothing here knows Flower.

An order is first settled: the node learns what became of the upload it keeps. Counted: its share is booked, once, in
the step that removes it. Not counted: it never happened, and the state is as it was before that training. Only then is
there new work. An upload is on the disk before anybody sees it, and one that was asked for twice is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedslr.channel import encoding
from fedslr.channel.model_size import parameters
from fedslr.core import factored
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import CheckpointError, FedslrError, StorageError, WireError
from fedslr.core.states import plain, restore
from fedslr.core.tree import Tree
from fedslr.core.types import Params
from fedslr.data.federation import ClientData, Federation
from fedslr.deploy import options
from fedslr.deploy.messages import (
    DONE,
    EIGHT_BIT,
    ENROL,
    EVALUATE,
    LONGEST,
    LOST,
    NUMBERS,
    REFUSED,
    TRAIN,
    UNKNOWN,
    Order,
    Report,
    digest,
    first_head,
    next_head,
)
from fedslr.deploy.node_store import NodeStore, Page, Pending
from fedslr.engine import preflight
from fedslr.engine.eager import Eager
from fedslr.storage.locks import lock
from fedslr.storage.tree_files import Entry

Data = Callable[[int], Federation]
"""The number of classes to a federation of one client: this node's data."""
STEPS = ("received", "booking", "booked", "trained", "pending", "answered")
"""The moments of a node's work, for those who want to look at one."""


class _Lost(Exception):
    """Node and server do not agree on what was booked."""


class _Alone(Sequence[ClientData]):
    """One client's data under its own number."""

    def __init__(self, data: ClientData) -> None:
        self.data = data

    def __len__(self) -> int:
        return 1

    def __getitem__(self, client: Any) -> Any:
        return self.data


class Node:
    """A client of a federation that lives in a folder."""

    def __init__(
        self,
        folder: Path,
        client: int,
        data: Data,
        say: Callable[[str], None] = lambda text: None,
        at: Callable[[str], None] = lambda step: None,
    ) -> None:
        self.client, self.data, self.say, self.at = client, data, say, at
        self.store = NodeStore(folder)

    def handle(self, order: Order) -> Report:
        """Do what is asked; whatever goes wrong is reported, not raised."""
        try:
            with lock(self.store.folder, wait=True, mode=0o700, called="store"):
                self.at("received")
                if order.note:
                    self.say(f"the server refused the last message: {order.note}")
                return self._do(order)
        except StorageError as error:
            self.say(f"round {order.round + 1}: {error}")
            return self._report(order, status=REFUSED, reason=str(error)[:LONGEST])
        except (_Lost, CheckpointError) as lost:
            self.say(f"round {order.round + 1}: {lost}; asking the server to enrol this node again")
            return self._report(order, status=LOST, reason=str(lost)[:LONGEST])
        except FedslrError as error:
            self.say(str(error))
            return self._report(order, status=REFUSED, reason=str(error)[:LONGEST])

    def _do(self, order: Order) -> Report:
        if order.kind == ENROL:
            return self._enrol(order)
        page = self._page(order)
        if order.client != self.client:
            raise FedslrError(f"this node is client {self.client}; the order is for client {order.client}")
        if order.kind not in (TRAIN, EVALUATE):
            raise FedslrError(f"this node does not know the order '{order.kind[:50]}'")
        page = self._settle(page, order)
        return (self._train if order.kind == TRAIN else self._evaluate)(_Work(self, page), order)

    def _page(self, order: Order) -> Page:
        """Where this node stands, if that is where the server thinks it stands."""
        page = self.store.read()
        if page is None:
            raise _Lost(f"there is nothing in {self.store.folder} yet")
        if page.run != order.run:
            raise FedslrError(f"{self.store.folder} belongs to another run ({page.run}); give this one its own folder")
        if (order.round, order.attempt) < page.seen:
            raise _Lost(f"the order is of round {order.round + 1}, attempt {order.attempt}, older than the last one")
        return page

    # --- enrolment ---------------------------------------------------------------------------------------------------

    def _enrol(self, order: Order) -> Report:
        """Become a client of the run, or come back to it with the books the server has."""
        asked = options.from_text(order.recipe)
        examples, inputs = self._check(asked, encoding.decode(order.start))
        page = None
        try:
            page = self.store.read()
        except StorageError:
            raise
        except CheckpointError as error:
            self.say(f"{error}; what is there is kept in {self.store.set_aside()}")
        if page is not None and page.run != order.run:
            raise FedslrError(f"{self.store.folder} belongs to another run ({page.run}); give this one its own folder")
        if page is None or order.client == self.client:
            self._begin(page, order, asked)
        return self._report(order, examples=examples, inputs=inputs)

    def _check(self, asked: options.Deployment, start: Params) -> tuple[int, str]:
        """How many examples this node has, and of what kind; a FedslrError if they, or the model, are not the
        federation's."""
        federation = self.data(asked.options.classes)
        held, task = _held(federation, asked), asked.task()
        for warning in preflight.check(task.model, federation, task.loss_function):
            self.say(warning)
        mine, theirs = ({k: (x.shape, x.dtype) for k, x in w.items()} for w in (task.params(), start))
        if mine != theirs:
            name = asked.recipe.model.name
            raise FedslrError(
                f"model.name: '{name}' is another model here than at the server; install the same version"
            )
        return len(held.y), _kind(federation)

    def _begin(self, page: Page | None, order: Order, asked: options.Deployment) -> None:
        """The personal part stays, if there is one; what the server mirrors is what it says."""
        algorithm, start = asked.recipe.algorithm, encoding.decode(order.start)
        state = algorithm.init_client(start)
        mirrored = algorithm.ledger + algorithm.addressing
        account = _decode(order.account) or _fields(state, mirrored)
        if page is not None:
            state = self._kept(page, state)
        if mirrored:
            state = state._replace(**account)
        head = order.head if order.client == self.client else first_head(order.run, self.client)
        new = Page(
            run=order.run,
            client=self.client,
            recipe=order.recipe,
            head=head,
            start=self.store.write(page, "start", start),
            state=self.store.write(page, "state", plain(state)),
            personal=page.personal if page else None,
            parts=page.parts if page else None,
            evaluation=page.evaluation if page else None,
            inputs=page.inputs if page else "",
            serial=page.serial if page else 0,
        )
        self.store.turn(new)

    def _kept(self, page: Page, fresh: Any) -> Any:
        """The state on the disk; a damaged one is put aside, and a fresh one takes its place."""
        try:
            return restore(type(fresh), self.store.tree(page.state))
        except StorageError:
            raise
        except CheckpointError as error:
            if (self.store.folder / page.state.file).exists():
                self.say(f"{error}; it is kept in {self.store.set_aside([page.state.file])}")
            return fresh

    # --- what became of the last upload ------------------------------------------------------------------------------

    def _settle(self, page: Page, order: Order) -> Page:
        """Book the upload that waits if it was counted; forget it if it was not, unless this is its own round."""
        waiting = page.pending
        if order.head == page.head:
            page = replace(page, seen=(order.round, order.attempt))
            if waiting and not (order.kind == TRAIN and _asks_again(order, waiting)):
                return self.store.turn(replace(page, pending=None))
            return page
        if waiting is None:
            raise _Lost("the server counted an upload that this node does not have")
        if order.head != next_head(page.head, waiting.round, waiting.attempt, waiting.digest, order.share):
            raise _Lost("the server counted another upload than the one this node has")
        self.at("booking")
        algorithm = options.from_text(page.recipe).recipe.algorithm
        kind = type(algorithm.init_client(self.store.tree(page.start)))
        upload = _decode(self.store.bytes(waiting.upload))
        state = algorithm.book(restore(kind, self.store.tree(waiting.trained)), upload, order.share)
        booked = self.store.write(page, "state", plain(state))
        page = self.store.turn(
            replace(page, head=order.head, state=booked, pending=None, seen=(order.round, order.attempt))
        )
        self.at("booked")
        return page

    # --- work --------------------------------------------------------------------------------------------------------

    def _train(self, work: _Work, order: Order) -> Report:
        page = work.page
        if page.pending is None:
            waiting = self._make_upload(work, order)
        else:
            waiting = replace(page.pending, attempt=order.attempt)
        self.store.turn(replace(page, pending=waiting, seen=(order.round, order.attempt)))
        self.at("pending")
        told = work.algorithm.addressing
        return self._report(
            order,
            examples=len(work.held.y),
            payload=self.store.bytes(waiting.upload),
            digest=waiting.digest,
            address=_encode(_fields(work.restored(waiting.trained), told)) if told else b"",
        )

    def _make_upload(self, work: _Work, order: Order) -> Pending:
        """Train, and put the upload and what follows from it on the disk. The ledger stays as it was."""
        state = work.restored(work.page.state)
        with work.named(order):
            trained, upload = work.engine.local_update(
                self.client, state, work.receive(order.payload), work.settings.round(order.round)
            )
            factored.require_finite({"state": plain(trained)})
            data = _encode(upload)
        if work.algorithm.ledger:
            trained = trained._replace(**_fields(state, work.algorithm.ledger))
        self.at("trained")
        return Pending(
            round=order.round,
            attempt=order.attempt,
            base=digest(order.payload),
            digest=digest(data),
            trained=self.store.write(work.page, "trained", plain(trained)),
            upload=self.store.write_bytes(work.page, "upload", data),
        )

    def _evaluate(self, work: _Work, order: Order) -> Report:
        """The accuracy of the personal and of the global model on this node's test data; the former is kept."""
        page, state, payload = work.page, work.restored(work.page.state), work.receive(order.payload)
        personal = work.engine.personal_model(self.client, state, payload)
        shared = work.algorithm.received_model(payload)
        parts = work.algorithm.deployed(state, _decode(order.payload, fold=True))
        accuracy = work.accuracy(personal)
        self.store.turn(
            replace(
                page,
                personal=self.store.write(page, "personal", dict(personal)),
                parts=self._kept_parts(page, parts),
                evaluation=(order.round, accuracy, len(work.held.y_test)),
                inputs=work.inputs,
            )
        )
        return self._report(
            order,
            examples=len(work.held.y),
            accuracy_personal=accuracy,
            accuracy_global=work.accuracy(shared),
            parameters=parameters(parts),
        )

    def _kept_parts(self, page: Page, parts: Tree) -> Entry | None:
        """What the personal model is made of, on the disk, unless that is nothing or of a kind that does not travel."""
        try:
            return self.store.write_bytes(page, "parts", _encode(parts)) if parts else None
        except (WireError, TypeError):
            return None

    def _report(self, order: Order, status: str = DONE, **fields: Any) -> Report:
        return Report(order.kind, status, order.run, self.client, order.round, order.attempt, **fields)


class _Work:
    """What a node needs to train and to test, made from its page."""

    def __init__(self, node: Node, page: Page) -> None:
        asked = options.from_text(page.recipe)
        self.page, self.store, self.client = page, node.store, node.client
        self.algorithm: Algorithm[Any, Any] = asked.recipe.algorithm
        self.settings = asked.recipe.settings
        task = asked.task()
        self.start = factored.to_device(self.store.tree(page.start), self.settings.torch_device())
        self.kind = type(self.algorithm.init_client(self.start))
        federation = node.data(asked.options.classes)
        task.copies = preflight.works_in_place(task.model, federation)
        self.held, self.inputs = _held(federation, asked), _kind(federation)
        placed = self.held.to(self.settings.torch_device(), self.settings.torch_dtype())
        self.engine = Eager(
            self.algorithm,
            task,
            _Alone(placed),
            self.settings.batch_size,
            self.settings.seed,
            asked.options.crop_padding,
            federation.normalization,
        )

    def restored(self, entry: Any) -> Any:
        return restore(self.kind, factored.to_device(self.store.tree(entry), self.settings.torch_device()))

    def receive(self, payload: bytes) -> Tree:
        return factored.to_device(_decode(payload), self.settings.torch_device())

    def accuracy(self, params: Params | None) -> float:
        found = None if params is None else self.engine.accuracy(params, [self.client])[0]
        return UNKNOWN if found is None else found

    @contextmanager
    def named(self, order: Order) -> Iterator[None]:
        """Whatever goes wrong here, went wrong in this client's round."""
        try:
            yield
        except WireError as error:
            where = f"round {order.round + 1}, client {self.client}"
            lr = self.settings.round(order.round).lr
            raise FedslrError(f"{where}: training diverged: {error}; a lower lr helps (now {lr:g})") from error


def _asks_again(order: Order, waiting: Pending) -> bool:
    return order.round == waiting.round and digest(order.payload) == waiting.base


def _held(found: Federation, asked: options.Deployment) -> ClientData:
    """This node's data, which must be of the federation's kind."""
    if found.input_shape != asked.options.shape:
        ours = "x".join(map(str, found.input_shape))
        raise FedslrError(f"data: inputs of this node are {ours}, the federation's are {asked.options.inputs}")
    held: ClientData = found.clients[0]
    return held


def _kind(held: Federation) -> str:
    """What inputs are, as models see them."""
    return NUMBERS if held.normalization is None else EIGHT_BIT


def _fields(state: Any, names: tuple[str, ...]) -> Tree:
    return {name: getattr(state, name) for name in names}


def _encode(tree: Tree) -> bytes:
    return encoding.encode(tree).data if tree else b""


def _decode(data: bytes, fold: bool = False) -> Tree:
    """What a message says, matrices multiplied out unless they should stay as they came; nothing for no message."""
    found = encoding.decode(data) if data else {}
    return found if fold else factored.unfold(found)
