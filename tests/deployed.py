"""A federation of nodes in one process, for the tests of `fedslr.deploy`: the real protocol without a network."""

from __future__ import annotations

import multiprocessing
import signal
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedslr
from dying import die_after_calls, die_at
from fedslr.core import tree
from fedslr.core.states import plain, restore
from fedslr.deploy import options
from fedslr.deploy.database import Database
from fedslr.deploy.exchange import Exchange
from fedslr.deploy.lifecycle import open_coordinator
from fedslr.deploy.messages import Order
from fedslr.deploy.node import Node
from fedslr.deploy.node_store import NodeStore
from fedslr.deploy.node_work import NodeWork
from fedslr.deploy.server import Coordinator
from fedslr.engine.aggregation import weight_of
from fedslr.engine.rounds import Simulation
from fedslr.engine.workload import Member
from fedslr.run import recipes

SIZES = [5, 11, 3, 8, 7]
RECIPE = """
rounds = 5
clients_per_round = 3
batch_size = 4
lr = 0.05
device = "cpu"
engine = "eager"
algorithm = {{ name = "{method}" }}
data = {{ clients = {clients} }}
model = {{ name = "mlp" }}
evaluate = {{ every = 2 }}
[federation]
inputs = "6"
classes = 3
deadline = 5
"""


def recipe(method: str = "fedslr", clients: int = len(SIZES), changes: Iterable[str] = ()) -> options.Deployment:
    return options.parse(recipes.apply(tomllib.loads(RECIPE.format(method=method, clients=clients)), list(changes)))


def data_of(federation: fedslr.Federation, client: int) -> Callable[[int, str], fedslr.Federation]:
    held, scale = [federation.clients[client]], federation.normalization
    return lambda classes, task: fedslr.Federation(held, classes, normalization=scale, task=task)


class Local:
    """Messages that arrive when they are looked for. `fate` may do something to an answer, or to who answers."""

    finishes = True
    """Whether nodes train their personal part once their answer has left, or leave that to the next order."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes_by_identity = dict(nodes)
        self.orders: list[tuple[str, Order]] = []
        self.sent: list[tuple[str, Order]] = []
        self.fate: Callable[[str, Order, Mapping[str, Any]], list[tuple[str, Mapping[str, Any]]]] = (
            lambda identity, order, fields: [(identity, fields)]
        )

    def nodes(self) -> list[str]:
        return list(self.nodes_by_identity)

    def send(self, identity: str, order: Order) -> None:
        self.orders = [(who, o) for who, o in self.orders if who != identity] + [(identity, order)]
        self.sent.append((identity, order))

    def receive(self) -> list[tuple[str, Mapping[str, Any]]]:
        orders, self.orders = self.orders, []
        answers = []
        for identity, order in orders:
            node = self.nodes_by_identity.get(identity)
            fields = None if node is None else self.answer(node, order)
            if fields is not None:
                answers += self.fate(identity, order, fields)
            if node is not None and self.finishes:
                node.finish()
        return answers

    def answer(self, node: Node, order: Order) -> Mapping[str, Any] | None:
        return node.handle(Order.from_fields(order.to_fields())).to_fields()


class Hurried(Local):
    """Nodes that leave their personal part to the next order."""

    finishes = False


FORK = multiprocessing.get_context("fork")


def kill_after_calls(count: int, work: Callable[[], object]) -> None:
    """Do some work in a process of its own, which is killed after so many function calls."""
    process = FORK.Process(target=lambda: (die_after_calls(count), work()))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


class Forked(Local):
    """Every order is worked on by a process of its own, which may be killed, and is then asked again."""

    finishes = False  # the process does

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        super().__init__(nodes)
        self.kill: Callable[[Node, Order], str | None] = lambda node, order: None
        self.deaths = 0

    def answer(self, node: Node, order: Order) -> Mapping[str, Any] | None:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_work, args=(node, order, self.kill(node, order), theirs))
        process.start()
        theirs.close()
        try:
            fields = ours.recv()
        except EOFError:
            fields = None
        process.join()
        if process.exitcode == -signal.SIGKILL:
            self.deaths += 1
        if fields is None:
            # The node is started again, and the post delivers its order once more.
            identity = next(who for who, n in self.nodes_by_identity.items() if n is node)
            self.orders.append((identity, order))
        return fields


BEFORE, AFTER = False, True
NODE_STEPS: dict[str, tuple[type, str, bool]] = {
    "received": (NodeStore, "read", BEFORE),
    "booking": (NodeWork, "book", BEFORE),
    "booked": (Node, "_book", AFTER),
    "trained": (NodeWork, "local_update", AFTER),
    "writing": (NodeStore, "write", AFTER),
    "turning": (NodeStore, "turn", BEFORE),
    "pending": (Node, "_train", AFTER),
    "answered": (Node, "finish", BEFORE),
    "personalized": (NodeWork, "personalize", AFTER),
    "finished": (Node, "finish", AFTER),
}
"""The moments at which a node can be killed; it has answered in the last three."""
SERVER_STEPS: dict[str, tuple[type, str, bool]] = {
    "opened": (Exchange, "_listen", BEFORE),
    "received": (Exchange, "receive", AFTER),
    "closing": (Coordinator, "_close", BEFORE),
    "writing": (Database, "_write", AFTER),
    "committing": (Database, "commit", BEFORE),
    "committed": (Database, "commit", AFTER),
    "evaluated": (Database, "save_evaluation", AFTER),
}
"""The moments at which a server can be killed."""


def _work(node: Node, order: Order, step: str | None, pipe: Any) -> None:
    if step is not None:
        die_at(*NODE_STEPS[step])
    pipe.send(node.handle(order).to_fields())
    node.finish()


class Clock:
    """Time that passes when somebody looks at it."""

    def __init__(self, tick: float = 0.25) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Federation:
    """Nodes in folders, and a server that can be opened again and again."""

    def __init__(
        self, home: Path, federation: fedslr.Federation, asked: options.Deployment, post: type[Local] = Local
    ) -> None:
        self.home, self.federation, self.asked = home, federation, asked
        self.said: list[str] = []
        nodes = {f"key-{i}": self.node(i) for i in range(len(federation.clients))}
        self.post = post(nodes)

    def node(self, client: int) -> Node:
        return Node(self.home / f"node-{client}", client, data_of(self.federation, client))

    def server(self, asked: options.Deployment | None = None, **options: Any) -> Coordinator:
        given = {"clock": Clock(), "say": self.said.append, **options}
        return open_coordinator(self.home / "run", asked, self.post, **given)

    @property
    def refused(self) -> list[str]:
        """What the server said of the messages that it refused."""
        return [line for line in self.said if line.startswith("the server refused a message")]

    def run(self, **options: Any) -> Coordinator:
        """Start or resume, and run to the end."""
        coordinator = self.server(self.asked, **options)
        try:
            for _ in coordinator.rounds():
                pass
        finally:
            coordinator.folder.close()
        return coordinator

    def member(self, client: int) -> Member:
        """A client's state, ledger and address as its disk has them."""
        return self.member_of(self.post.nodes_by_identity.get(f"key-{client}") or self.node(client))

    def member_of(self, node: Node) -> Member:
        page, algorithm = node.store.read(), self.asked.recipe.algorithm
        assert page is not None
        start, kept = node.store.tree(page.start), node.store.tree(page.state)
        state = restore(algorithm.init_client(start), kept["client"])
        return Member(state, restore(algorithm.init_ledger(start), kept["ledger"]), algorithm.address(state))

    def simulated(self, cohorts: list[list[int]] | None = None) -> Simulation:
        """The same run as a simulation, states on the disk as nodes have them; with given cohorts, if there are any."""
        rounds = iter(cohorts or [])
        select = None if cohorts is None else (lambda rng, size, examples: next(rounds))
        settings = replace(self.asked.recipe.settings, store="disk")
        found = Simulation(self.asked.recipe.algorithm, self.federation, "mlp", settings, select=select)
        self.records = list(found.rounds())
        return found


def mismatch(federation: Federation, coordinator: Coordinator) -> float:
    """‖mean ledger of the server − weighted mean of the clients' ledgers‖ over the norm of the former."""
    mean = tree.Mean()
    for client, member in coordinator.accounts.members.items():
        kept = plain(federation.member(client).ledger)
        mean.add(tree.map(torch.Tensor.double, kept), weight_of(coordinator.algorithm, member.examples))
    held = tree.map(torch.Tensor.double, plain(coordinator.accounts.state.mean_ledger))
    assert float(tree.norm(held)) > 0
    return float(tree.norm(tree.sub(held, mean.value())) / tree.norm(held))
