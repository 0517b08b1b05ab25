"""The adapters to Flower: a ServerApp and a ClientApp that carry orders and reports, and nothing else.

A message has one ConfigRecord, `fedslr`, with the fields of an order or a report; tensors are bytes that the channel
encoded. A node is known by its key if the SuperLink asks for keys, else by the number that Flower gives it. The
SuperNode's settings say which client it is, and where its data and its store are:

    flower-supernode … --node-config 'client=3 data="/srv/data" store="/srv/fedslr"'

Under Flower's own simulation a node's partition is its client number, its data are the recipe's, and its store is in
the run folder.

A SuperNode starts a process for every message. The process pushes its reply, then it runs its exit handlers: there the
personal part is trained. A thread would not do, because Flower kills the process five seconds after the reply.
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
from flwr.supercore.exit import add_exit_handler

from fedslr.core import plugins
from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError, TakenError, WireError
from fedslr.data import build_federation
from fedslr.data.federation import Federation
from fedslr.data.node_data import read_node_data
from fedslr.deploy import keys, options
from fedslr.deploy.lifecycle import FAILURE_FILE, TAKEOVER_SECONDS, finish, open_coordinator
from fedslr.deploy.messages import ENROL, EVALUATE, TRAIN, Order, digest, quoted
from fedslr.deploy.node import Node
from fedslr.deploy.node_work import Data
from fedslr.deploy.server import Coordinator

RECORD = "fedslr"
TYPES = {ENROL: MessageType.QUERY, TRAIN: MessageType.TRAIN, EVALUATE: MessageType.EVALUATE}
POLL_SECONDS = 0.5
"""The time between two looks for answers."""
RESEND_SECONDS = 5.0
"""An order that Flower could not deliver is sent once more after so long."""
MAX_ERRORS = 3
"""An order is not sent again to a node that answered it with so many errors."""
PARENT_OPTION = "--parent-pid"
"""The argument of a process that Flower wants to end with its parent."""
EXIT_SECONDS = 5.0
"""A server whose SuperLink is gone may take so long to end by itself."""


def say(text: str) -> None:
    """Print a line, which Flower collects."""
    print(text, flush=True)


# --- the server's side ----------------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """A node that Flower can reach."""

    number: int
    started: str
    """The time at which the node last came up."""


class Sent(NamedTuple):
    """An order that was not answered yet."""

    order: Order
    message: str | None
    """Flower's name of the message; None if it could not be delivered."""
    started: str
    """The time at which the node had come up."""
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
        if time.monotonic() > self._looked + POLL_SECONDS:
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
        time.sleep(POLL_SECONDS)
        self._send_again()
        answers = []
        for identity, sent in list(self.sent.items()):
            if sent.message is not None:
                answers += [(identity, fields) for fields in self._pull(identity, sent)]
        return answers

    def _pull(self, identity: str, sent: Sent) -> list[Mapping[str, Any]]:
        """Return the answer to one order; an answer that Flower cannot read must not hide the others."""
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
        """Send again the orders whose node came up since, and those that could not be delivered a while ago."""
        self.nodes()
        for identity, sent in list(self.sent.items()):
            node = self._reached.get(identity)
            undelivered = (
                sent.message is None and sent.errors < MAX_ERRORS and time.monotonic() > sent.time + RESEND_SECONDS
            )
            if node is not None and (undelivered or node.started != sent.started):
                self._send(identity, sent.order, sent.errors)


def _identity(node: Any) -> str:
    return digest(node.public_key) if node.public_key else f"node-{node.node_id}"


def _registered(folder: str | None) -> Callable[[int], str | None]:
    """Return a function from a client's number to the identity that its node must have, if keys are registered."""
    if folder is None:
        return lambda number: None
    return lambda number: _known_key(Path(folder), number)


def _known_key(folder: Path, number: int) -> str:
    try:
        return digest(keys.registered_key(folder, number))
    except FedslrError as error:
        raise WireError(f"it says it is client {number}, whose key is not registered: {error}") from None


def asked_for(context: Context) -> options.Deployment | None:
    """Return the request in a run's settings, or the demo's; None to resume."""
    text = str(context.run_config.get("recipe", ""))
    return options.demo() if text == "demo" else options.from_text(text) if text else None


def run_folder(context: Context) -> Path:
    """Return the folder that a run's settings name, else a temporary folder of that run."""
    named = str(context.run_config.get("out", ""))
    return Path(named) if named else Path(tempfile.gettempdir()) / f"fedslr-{context.run_id}"


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run what is left of a federation; the run's settings name its folder and, to begin it, its recipe."""
    folder = run_folder(context)
    if PARENT_OPTION in sys.argv:
        end_with_parent()
    post = FlowerPost(grid)
    with _noting_failure(folder):
        coordinator = open_coordinator(folder, asked_for(context), post, patience=TAKEOVER_SECONDS, say=say)
    # Nobody needs an order that is older than its round.
    post.lifetime = coordinator.options.deadline + RESEND_SECONDS
    try:
        # This also removes the failure that the server before may have left.
        with _noting_failure(folder):
            federate(coordinator)
    finally:
        coordinator.folder.close()


def end_with_parent() -> None:
    """End this process when its parent is gone.

    Flower asks for that too, but a process that is sending an order, which it tries for ever, does not hear it. Nothing
    is lost, because every finished round is on the disk.
    """
    parent = os.getppid()
    if parent == 1 and PARENT_OPTION in sys.argv[:-1]:
        # The parent was gone before this began.
        parent = int(sys.argv[sys.argv.index(PARENT_OPTION) + 1])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(EXIT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def federate(coordinator: Coordinator) -> None:
    """Run what is left of a run, and write its results."""
    coordinator.folder.forget_results()
    coordinator.exchange.enrolment.registered = _registered(coordinator.options.keys)
    say(f"run {coordinator.run}: {coordinator.done} of {coordinator.settings.rounds} rounds are done")
    for record in coordinator.rounds():
        say(f"round {record.round} is done: clients {record.clients} in {record.seconds:.1f} s")
    finish(coordinator)


@contextmanager
def _noting_failure(folder: Path) -> Iterator[None]:
    """Write why the server failed to the run folder, for those who wait for the run."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE_FILE).unlink(missing_ok=True)
    try:
        yield
    except TakenError:
        # Another server is at work there, and reports its own failures.
        raise
    except Exception as error:
        write_durably(folder / FAILURE_FILE, f"{plugins.own_mistake(error) or error}\n".encode())
        raise


# --- a node's side --------------------------------------------------------------------------------------------------

client = ClientApp()


@client.query()
@client.train()
@client.evaluate()
def handle(message: Message, context: Context) -> Message:
    """Do what an order says."""
    order, node = Order.from_fields(dict(message.content.config_records[RECORD])), node_of(context)
    report = node.handle(order)
    if order.kind == TRAIN and not is_simulated(context):
        # Flower's simulation keeps its processes. There a node trains its personal part when the next order comes.
        add_exit_handler(node.finish, run_before_force_exit=True)
    return Message(RecordDict({RECORD: ConfigRecord(report.to_fields())}), reply_to=message)


def is_simulated(context: Context) -> bool:
    """Return whether a node is one of Flower's own simulation."""
    return "partition-id" in context.node_config


def node_of(context: Context) -> Node:
    """Return the node that a SuperNode's settings describe."""
    given = context.node_config
    if is_simulated(context):
        number = int(given["partition-id"])
        return Node(run_folder(context) / "nodes" / str(number), number, _simulated(context, number), say)
    for key in ("client", "data", "store"):
        if key not in given:
            raise FedslrError(f"node-config: '{key}' is missing; give client, data and store")
    path = Path(str(given["data"]))
    return Node(Path(str(given["store"])), int(given["client"]), lambda classes: read_node_data(path, classes), say)


def _simulated(context: Context, number: int) -> Data:
    """Return a function that gives a client's part of the recipe's data."""
    asked = asked_for(context)
    if asked is None:
        raise FedslrError("recipe: Flower's simulation needs the recipe in the run's settings, to resume too")

    def data(classes: int) -> Federation:
        whole = build_federation(asked.recipe.data)
        if number >= len(whole.clients):
            raise FedslrError(f"data.clients: the recipe has {len(whole.clients)}, and this would be client {number}")
        return Federation([whole.clients[number]], classes, whole.name, normalization=whole.normalization)

    return data
