"""The adapters to Flower: a ServerApp and a ClientApp that carry orders and reports.

A message has one ConfigRecord, `fedslr`, with the fields of an order or a report; tensors are bytes that the channel
encoded. The digest of its key identifies a node. If the SuperLink asks for no keys, the number that Flower gives a node
does. The SuperNode's settings contain the client's number and the paths of the data and the store:

    flower-supernode … --node-config 'client=3 data="/srv/data" store="/srv/fedslr"'

In Flower's own simulation the partition of a node is its client number, its data are the recipe's, and its store is in
the run folder.

A SuperNode starts a process for every message. The process sends its reply and then runs its exit handlers, which train
the personal part. A thread could not do that, because Flower kills the process five seconds after the reply.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import add_exit_handler

from fedslr.core import plugins
from fedslr.core.durable import write_durably
from fedslr.core.errors import FedslrError, TakenError
from fedslr.data import build_federation
from fedslr.data.federation import Federation
from fedslr.data.node_data import read_node_data
from fedslr.deploy import options
from fedslr.deploy.lifecycle import FAILURE_FILE, TAKEOVER_SECONDS, finish, open_coordinator
from fedslr.deploy.messages import ENROL, EVALUATE, TRAIN, Order, digest, quoted
from fedslr.deploy.node import Node
from fedslr.deploy.node_work import Data

RECORD = "fedslr"
TYPES = {ENROL: MessageType.QUERY, TRAIN: MessageType.TRAIN, EVALUATE: MessageType.EVALUATE}
POLL_SECONDS = 0.5
"""The time between two requests for answers."""
RESEND_SECONDS = 5.0
"""The time after which the server sends an order again that Flower could not deliver."""
MAX_ERRORS = 3
"""The number of errors in answer to an order after which the server does not send it again."""
PARENT_OPTION = "--parent-pid"
"""The argument that Flower gives a process that has to end with its parent."""
EXIT_SECONDS = 5.0
"""The time that a server has to end by itself after its SuperLink ended."""


def say(text: str) -> None:
    """Print a line to the output that Flower collects."""
    print(text, flush=True)


# --- the server's side ----------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """An order without an answer yet."""

    order: Order
    message: str | None
    """Flower's identifier of the message; None if it could not be delivered."""
    started: str
    """The time at which the node had last started."""
    time: float
    errors: int = 0


class FlowerPost:
    """Carries messages over a Grid. It sends an order again if the node was down or restarted."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.lifetime: float | None = None
        """The seconds that an order may take to arrive; None is no limit."""
        self.sent: dict[str, Sent] = {}
        self._reached: dict[str, Any] = {}
        """The nodes that Flower can reach, by identity."""
        self._looked = 0.0

    def nodes(self) -> Iterable[str]:
        if time.monotonic() > self._looked + POLL_SECONDS:
            self._reached = {_identity(node): node for node in self.grid.get_nodes()}
            self._looked = time.monotonic()
        return self._reached

    def send(self, identity: str, order: Order, errors: int = 0) -> None:
        self.nodes()
        message, node = None, self._reached.get(identity)
        if node is not None:
            content = RecordDict({RECORD: ConfigRecord(order.to_fields())})
            kind, group = TYPES[order.kind], str(order.round + 1)
            pushed = self.grid.push_messages([Message(content, node.node_id, kind, ttl=self.lifetime, group_id=group)])
            message = next(iter(pushed), None)
        started = "" if node is None else node.last_activated_at
        self.sent[identity] = Sent(order, message, started, time.monotonic(), errors)

    def receive(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        time.sleep(POLL_SECONDS)
        self._send_again()
        return [(identity, fields) for identity in list(self.sent) for fields in self._pull(identity)]

    def _pull(self, identity: str) -> list[Mapping[str, Any]]:
        """Return a node's answer, if there is one; it is pulled alone because Flower may fail to read it."""
        sent = self.sent[identity]
        if sent.message is None:
            return []
        try:
            found = list(self.grid.pull_messages([sent.message]))
        except Exception as error:
            say(f"Flower cannot read an answer from node {identity[:16]}: {quoted(str(error))}")
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
        """Send orders again whose node restarted, or that Flower could not deliver some seconds ago."""
        self.nodes()
        for identity, sent in list(self.sent.items()):
            node = self._reached.get(identity)
            undelivered = (
                sent.message is None and sent.errors < MAX_ERRORS and time.monotonic() > sent.time + RESEND_SECONDS
            )
            if node is not None and (undelivered or node.last_activated_at != sent.started):
                self.send(identity, sent.order, sent.errors)


def _identity(node: Any) -> str:
    return digest(node.public_key) if node.public_key else f"node-{node.node_id}"


def asked_for(context: Context) -> options.Deployment | None:
    """Return the deployment in a run's settings, or the demo's; None means to resume."""
    text = str(context.run_config.get("recipe", ""))
    return options.demo() if text == "demo" else options.from_text(text) if text else None


def run_folder(context: Context) -> Path:
    """Return the folder that a run's settings name, or a temporary folder for the run."""
    named = str(context.run_config.get("out", ""))
    return Path(named) if named else Path(tempfile.gettempdir()) / f"fedslr-{context.run_id}"


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the remaining rounds of a federation, and write its results.

    The run's settings contain the run folder and, for a new run, the recipe.
    """
    folder = run_folder(context)
    if PARENT_OPTION in sys.argv:
        end_with_parent()
    post = FlowerPost(grid)
    with _noting_failure(folder):
        coordinator = open_coordinator(folder, asked_for(context), post, patience=TAKEOVER_SECONDS, say=say)
        # The previous server may have written its failure while this one waited for the folder.
        (folder / FAILURE_FILE).unlink(missing_ok=True)
        # An order is useless after the end of its round.
        post.lifetime = coordinator.options.deadline + RESEND_SECONDS
        with contextlib.closing(coordinator.folder):
            coordinator.folder.forget_results()
            say(f"run {coordinator.run}: {coordinator.done} of {coordinator.settings.rounds} rounds are done")
            for record in coordinator.rounds():
                say(f"round {record.round} is done: clients {record.clients} in {record.seconds:.1f} s")
            finish(coordinator)


def end_with_parent() -> None:
    """End this process when its parent is gone.

    Flower does that too, but not while a process sends an order, which it retries without end. No finished round is
    lost, because all of them are on the disk.
    """
    parent = os.getppid()
    if parent == 1 and PARENT_OPTION in sys.argv[:-1]:
        # The parent was gone before this function began.
        parent = int(sys.argv[sys.argv.index(PARENT_OPTION) + 1])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(EXIT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _noting_failure(folder: Path) -> Iterator[None]:
    """Write the reason of a failure to the run folder, for the commands that wait for the run."""
    try:
        yield
    except TakenError:
        # Another server works in this folder and reports its own failures.
        raise
    except Exception as error:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / FAILURE_FILE, f"{plugins.own_mistake(error) or error}\n".encode())
        raise


# --- a node's side --------------------------------------------------------------------------------------------------

client = ClientApp()


@client.query()
@client.train()
@client.evaluate()
def handle(message: Message, context: Context) -> Message:
    """Carry out an order and return the report."""
    order, node = Order.from_fields(dict(message.content.config_records[RECORD])), node_of(context)
    report = node.handle(order)
    if order.kind == TRAIN and not is_simulated(context):
        # The processes of Flower's simulation do not end. There a node trains its personal part with the next order.
        add_exit_handler(node.finish, run_before_force_exit=True)
    return Message(RecordDict({RECORD: ConfigRecord(report.to_fields())}), reply_to=message)


def is_simulated(context: Context) -> bool:
    """Return whether a node belongs to Flower's own simulation."""
    return "partition-id" in context.node_config


def node_of(context: Context) -> Node:
    """Return the node that a SuperNode's settings describe."""
    given = context.node_config
    if is_simulated(context):
        number = int(given["partition-id"])
        return Node(run_folder(context) / "nodes" / str(number), number, _simulated(context, number), say)
    for key in ("client", "data", "store"):
        if key not in given:
            raise FedslrError(f"--node-config: '{key}' is missing; give the SuperNode client, data and store")
    path = Path(str(given["data"]))
    return Node(
        Path(str(given["store"])), int(given["client"]), lambda classes, task: read_node_data(path, classes, task), say
    )


def _simulated(context: Context, number: int) -> Data:
    """Return a function that returns a client's part of the recipe's data."""
    asked = asked_for(context)
    if asked is None:
        raise FedslrError("recipe: Flower's simulation needs it in --run-config, to resume a run too; add recipe=…")

    def data(classes: int, task: str) -> Federation:
        whole = build_federation(asked.recipe.data, task=task)
        if number >= len(whole.clients):
            raise FedslrError(
                f"data.clients: Flower simulates node {number}, but the recipe has {len(whole.clients)} clients; set "
                f"num-supernodes={len(whole.clients)}"
            )
        return Federation([whole.clients[number]], classes, whole.name, normalization=whole.normalization, task=task)

    return data
