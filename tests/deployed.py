"""A federation of nodes in one process, for the tests of `fedslr.deploy`: the real protocol without a network."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedslr
from dying import die_after_calls
from fedslr.core import tree
from fedslr.core.states import restore
from fedslr.deploy import node as node_module
from fedslr.deploy import options
from fedslr.deploy.messages import Order
from fedslr.deploy.node import Node
from fedslr.deploy.server import Coordinator, open_coordinator
from fedslr.engine.rounds import Simulation
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


def data_of(federation: fedslr.Federation, client: int) -> Callable[[int], fedslr.Federation]:
    held, scale = [federation.clients[client]], federation.normalization
    return lambda classes: fedslr.Federation(held, classes, normalization=scale)


class Local:
    """Messages that arrive when they are looked for. `fate` may do something to an answer, or to who answers."""

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
        return answers

    def answer(self, node: Node, order: Order) -> Mapping[str, Any] | None:
        return node.handle(Order.from_fields(order.to_fields())).to_fields()


FORK = multiprocessing.get_context("fork")


def kill_after_calls(count: int, work: Callable[[], object]) -> None:
    """Do some work in a process of its own, which is killed after so many function calls."""
    process = FORK.Process(target=lambda: (die_after_calls(count), work()))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


class Forked(Local):
    """Every order is worked on by a process of its own, which may be killed, and is then asked again."""

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


STEPS = (*node_module.STEPS, "turning")
"""The moments of a node's work, and the one in which its files are written but its page is not."""


def _work(node: Node, order: Order, step: str | None, pipe: Any) -> None:
    def die_at(now: str) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    node.at = die_at
    turn = node.store.turn
    node.store.turn = lambda page: (die_at("turning"), turn(page))[1]  # type: ignore[method-assign]
    fields = node.handle(order).to_fields()
    pipe.send(fields)
    die_at("answered")


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
        nodes = {f"key-{i}": self.node(i) for i in range(len(federation.clients))}
        self.post = post(nodes)

    def node(self, client: int) -> Node:
        return Node(self.home / f"node-{client}", client, data_of(self.federation, client))

    def server(self, asked: options.Deployment | None = None, **options: Any) -> Coordinator:
        given = {"clock": Clock(), **options}
        return open_coordinator(self.home / "run", asked, self.post, **given)

    def run(self, **options: Any) -> Coordinator:
        """Start or resume, and run to the end."""
        coordinator = self.server(self.asked, **options)
        try:
            for _ in coordinator.rounds():
                pass
        finally:
            coordinator.folder.close()
        return coordinator

    def state(self, client: int) -> Any:
        """A client's state as its disk has it."""
        node = self.post.nodes_by_identity.get(f"key-{client}") or self.node(client)
        page = node.store.read()
        assert page is not None
        algorithm = self.asked.recipe.algorithm
        return restore(type(algorithm.init_client(node.store.tree(page.start))), node.store.tree(page.state))

    def simulated(self, cohorts: list[list[int]] | None = None) -> Simulation:
        """The same run as a simulation, states on the disk as nodes have them; with given cohorts, if there are any."""
        rounds = iter(cohorts or [])
        select = None if cohorts is None else (lambda rng, size, examples: next(rounds))
        settings = replace(self.asked.recipe.settings, store="disk")
        found = Simulation(self.asked.recipe.algorithm, self.federation, "mlp", settings, select=select)
        self.records = list(found.rounds())
        return found


SERVER_SIDE = {"fedslr": "gamma", "feddyn": "h", "scaffold": "c"}


def mismatch(federation: Federation, coordinator: Coordinator) -> float:
    """‖mean the server keeps − mean of what the clients keep‖ over the norm of the former."""
    algorithm = coordinator.algorithm
    kept = getattr(coordinator.server, SERVER_SIDE.get(algorithm.name, "gamma"))
    mine = tree.mean([getattr(federation.state(c), algorithm.ledger[0]) for c in coordinator.members])
    double = [tree.map(torch.Tensor.double, x) for x in (kept, mine)]
    return float(tree.norm(tree.sub(*double)) / tree.norm(double[0]))
