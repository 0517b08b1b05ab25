"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning (ICML 2020), option II."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


class Server(NamedTuple):
    w: Params
    c: Params
    """The server's control, the mean of the clients'."""
    num_clients: int


class Client(NamedTuple):
    c: Params


@dataclass(frozen=True)
class Scaffold(Algorithm[Server, Client]):
    """Local SGD whose drift is corrected by control variates; they travel too, so it sends twice as much."""

    name: ClassVar[str] = "scaffold"
    ledger: ClassVar[tuple[str, ...]] = ("c",)

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(w, tree.zeros(w), num_clients)

    def init_client(self, w: Params) -> Client:
        return Client(tree.zeros(w))

    def broadcast(self, server: Server) -> Payload:
        return {"w": server.w, "c": server.c}

    def local_update(
        self, task: Task, client: Client, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """v ← v − η(g(v) − c_i + c), then c_i ← c_i − c + (w − v)/(Kη) with K the number of local steps."""
        w, c = payload["w"], payload["c"]

        def step(v: Params, batch: Batch) -> Params:
            correct = lambda v, g, mine, c: v - round.lr * (g - mine + c)  # noqa: E731
            return tree.map(correct, v, task.grad(v, batch), client.c, c)

        difference = tree.sub(scan(step, w, data.epochs(round.epochs)), w)
        travelled = data.steps(round.epochs) * round.lr
        change = tree.map(lambda c, d: -c - d / travelled, c, difference)
        return Client(tree.add(client.c, change)), {"w": difference, "c": change}

    def book(self, client: Client, upload: Payload, share: float) -> Client:
        """c_i ← c_i + share·(c_i⁺ − c_i)."""
        return Client(tree.map(lambda c, d: c + share * d, client.c, upload["c"]))

    def aggregate(self, server: Server, mean_upload: Payload, cohort_size: int) -> Server:
        """w ← mean_S v_i, c ← c + 1/M Σ_S (c_i⁺ − c_i)."""
        share = cohort_size / server.num_clients
        c = tree.map(lambda c, d: c + share * d, server.c, mean_upload["c"])
        return Server(tree.add(server.w, mean_upload["w"]), c, server.num_clients)

    def resize(self, server: Server, num_clients: int, leaving: Client | None = None) -> Server:
        """c is the mean of the c_i and stays it."""
        c = tree.remean(server.c, server.num_clients, num_clients, leaving and leaving.c)
        return Server(server.w, c, num_clients)

    def global_model(self, server: Server) -> Params:
        return server.w

    def personal_model(self, task: Task, client: Client, payload: Payload, data: LocalData) -> Params:
        w: Params = payload["w"]
        return w

    def received_model(self, payload: Payload) -> Params:
        w: Params = payload["w"]
        return w

    def shared(self, payload: Payload) -> Payload:
        return {"w": payload["w"]}

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return self.shared(payload)
