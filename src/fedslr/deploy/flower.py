"""The adapters to Flower: a ServerApp and a ClientApp that carry orders and reports, and nothing else.

A message has one ConfigRecord, `fedslr`, with the fields of an order or a report; tensors are bytes made by `wire`. A
node is known by its key, where the SuperLink asks for one, else by the number Flower gives it. The SuperNode's settings
say which client it is, where its data are and where its store is:

    flower-supernode … --node-config 'client=3 data="/srv/data" store="/srv/fedslr"'

Under Flower's own simulation a node's partition is its client number, its data are the recipe's, and its store is in
the run folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError, TakenError, WireError
from fedslr.data import own, share_out
from fedslr.data.federation import Federation
from fedslr.deploy import keys, options
from fedslr.deploy.messages import ENROL, EVALUATE, TRAIN, Order, digest, quoted
from fedslr.deploy.node import Data, Node
from fedslr.deploy.server import FAILURE, LINGERING, Coordinator, finish, open_coordinator

RECORD = "fedslr"
TYPES = {ENROL: MessageType.QUERY, TRAIN: MessageType.TRAIN, EVALUATE: MessageType.EVALUATE}
POLL = 0.5
"""Seconds between two looks for answers."""
AGAIN = 5.0
"""Seconds after which an order that Flower could not deliver is sent once more."""
TRIES = 3
"""How often an order is sent to a node that answers it with an error."""


OWNED = "--parent-pid"
"""Among a process' arguments: Flower wants it to end with the one that started it."""
PARTING = 5.0
"""Seconds that a server whose SuperLink is gone may take to end by itself."""


def say(text: str) -> None:
    """Flower collects what apps print."""
    print(text, flush=True)


# --- the server's side ----------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """A node as Flower knows it."""

    number: int
    started: str
    """When it last came up."""


class Sent(NamedTuple):
    """An order on its way."""

    order: Order
    message: str | None
    """Flower's name of it; None: it could not be delivered."""
    started: str
    """When its node had come up."""
    time: float
    errors: int = 0


class FlowerPost:
    """Carries messages over a Grid. An order to a node that went down, or came up again, is sent once more."""

    def __init__(self, grid: Grid, lifetime: float | None = None) -> None:
        self.grid, self.lifetime = grid, lifetime
        self.sent: dict[str, Sent] = {}
        self._reached: dict[str, Reached] = {}
        self._looked = 0.0

    def nodes(self) -> Iterable[str]:
        if time.monotonic() > self._looked + POLL:
            found = self.grid.get_nodes()
            self._reached = {_identity(n): Reached(n.node_id, n.last_activated_at) for n in found}
            self._looked = time.monotonic()
        return self._reached

    def send(self, identity: str, order: Order) -> None:
        self._send(identity, order, 0)

    def _send(self, identity: str, order: Order, errors: int) -> None:
        self.nodes()
        node = self._reached.get(identity)
        message = None if node is None else self._push(node.number, order)
        started = "" if node is None else node.started
        self.sent[identity] = Sent(order, message, started, time.monotonic(), errors)

    def _push(self, node: int, order: Order) -> str | None:
        content = RecordDict({RECORD: ConfigRecord(order.to_fields())})
        message = Message(content, node, TYPES[order.kind], ttl=self.lifetime, group_id=str(order.round + 1))
        return next(iter(self.grid.push_messages([message])), None)

    def receive(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        time.sleep(POLL)
        self._send_again()
        answers = []
        for identity, sent in list(self.sent.items()):
            if sent.message is not None:
                answers += [(identity, fields) for fields in self._pull(identity, sent)]
        return answers

    def _pull(self, identity: str, sent: Sent) -> list[Mapping[str, Any]]:
        """The answer to one order, by itself: one that Flower cannot read must not take others with it."""
        try:
            found = list(self.grid.pull_messages([str(sent.message)]))
        except Exception as error:
            say(f"an answer of node {identity[:16]} cannot be read: {quoted(str(error))}")
            del self.sent[identity]
            return [{}]
        if not found:
            return []
        if found[0].has_error():
            say(f"node {identity[:16]} did not answer: {quoted(found[0].error.reason or 'no reason given')}")
            self.sent[identity] = sent._replace(message=None, time=time.monotonic(), errors=sent.errors + 1)
            return []
        del self.sent[identity]
        return [dict(found[0].content.config_records.get(RECORD, {}))]

    def _send_again(self) -> None:
        """Orders whose node came up after they were sent, and those that could not be delivered a while ago."""
        self.nodes()
        for identity, sent in list(self.sent.items()):
            node = self._reached.get(identity)
            undelivered = sent.message is None and sent.errors < TRIES and time.monotonic() > sent.time + AGAIN
            if node is not None and (undelivered or node.started != sent.started):
                self._send(identity, sent.order, sent.errors)


def _identity(node: Any) -> str:
    return digest(node.public_key) if node.public_key else f"node-{node.node_id}"


def _registered(folder: str | None) -> Callable[[int], str | None]:
    """Which node a client must be: the one with its registered key, if there is a folder of such."""
    if folder is None:
        return lambda number: None
    return lambda number: _known_key(Path(folder), number)


def _known_key(folder: Path, number: int) -> str:
    try:
        return digest(keys.registered_key(folder, number))
    except FedslrError as error:
        raise WireError(f"it says it is client {number}, whose key nobody can tell: {error}") from None


def asked_for(context: Context) -> options.Deployment | None:
    """The recipe in a run's settings, or the demo's; None to resume."""
    text = str(context.run_config.get("recipe", ""))
    return options.demo() if text == "demo" else options.from_text(text) if text else None


def run_folder(context: Context) -> Path:
    """The folder that a run's settings name, else a temporary one of that run."""
    named = str(context.run_config.get("out", ""))
    return Path(named) if named else Path(tempfile.gettempdir()) / f"fedslr-{context.run_id}"


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run what is left of a federation. The run's settings name its folder and, to begin one, its recipe."""
    folder = run_folder(context)
    if OWNED in sys.argv:
        end_with_parent()
    post = FlowerPost(grid)
    with _telling(folder):
        coordinator = open_coordinator(folder, asked_for(context), post, patience=LINGERING, say=say)
    # An order that is older than its round is of no use to anybody.
    post.lifetime = coordinator.options.deadline + AGAIN
    try:
        # What the server before said in leaving is no matter any more.
        with _telling(folder):
            federate(coordinator)
    finally:
        coordinator.folder.close()


def end_with_parent() -> None:
    """End this process when the one that started it is gone. Flower asks for that too, but its request is not heard
    while an order is being sent, which is tried for ever. Nothing is lost: what was committed is on the disk."""
    parent = os.getppid()
    if parent == 1 and OWNED in sys.argv[:-1]:
        # It was gone before this began.
        parent = int(sys.argv[sys.argv.index(OWNED) + 1])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        time.sleep(PARTING)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def federate(coordinator: Coordinator) -> None:
    """What is left of a run, and its results."""
    coordinator.folder.forget_results()
    coordinator.registered = _registered(coordinator.options.keys)
    say(f"run {coordinator.run}: {coordinator.done} of {coordinator.settings.rounds} rounds are done")
    for record in coordinator.rounds():
        say(f"round {record.round} is done: clients {record.clients} in {record.seconds:.1f} s")
    finish(coordinator)


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Leave a line in the run folder for those who wait for the run."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE).unlink(missing_ok=True)
    try:
        yield
    except TakenError:
        # The server that is at work there says what becomes of it.
        raise
    except Exception as error:
        write_durably(folder / FAILURE, f"{error}\n".encode())
        raise


# --- a node's side --------------------------------------------------------------------------------------------------

client = ClientApp()


@client.query()
@client.train()
@client.evaluate()
def handle(message: Message, context: Context) -> Message:
    """Do what an order says."""
    order = Order.from_fields(dict(message.content.config_records[RECORD]))
    report = node_of(context).handle(order)
    return Message(RecordDict({RECORD: ConfigRecord(report.to_fields())}), reply_to=message)


def node_of(context: Context) -> Node:
    """The node that a SuperNode's settings describe."""
    given = context.node_config
    if "partition-id" in given:
        number = int(given["partition-id"])
        return Node(run_folder(context) / "nodes" / str(number), number, _simulated(context, number), say)
    for key in ("client", "data", "store"):
        if key not in given:
            raise FedslrError(f"node-config: '{key}' is missing; give client, data and store")
    path = Path(str(given["data"]))
    return Node(Path(str(given["store"])), int(given["client"]), lambda classes: own.one_client(path, classes), say)


def _simulated(context: Context, number: int) -> Data:
    """A client's part of the recipe's data."""
    asked = asked_for(context)
    if asked is None:
        raise FedslrError("recipe: Flower's simulation needs the recipe in the run's settings, to resume too")

    def data(classes: int) -> Federation:
        whole = share_out(asked.recipe.data)
        if number >= len(whole.clients):
            raise FedslrError(f"data.clients: the recipe has {len(whole.clients)}, and this would be client {number}")
        return Federation([whole.clients[number]], classes, whole.name, normalization=whole.normalization)

    return data
