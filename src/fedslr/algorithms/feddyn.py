"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization (ICLR 2021).

FedSLR with rank penalty 0 makes exactly these global iterates, with α = 1/η_g. The two files share nothing on purpose:
each is the other's oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.schema import positive
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


class Server(NamedTuple):
    w: Params
    h: Params
    num_clients: int


class Client(NamedTuple):
    gamma: Params


@dataclass(frozen=True)
class FedDyn(Algorithm[Server, Client]):
    """Local SGD on a loss whose linear and quadratic terms make the clients' optima agree with the server's."""

    name: ClassVar[str] = "feddyn"
    ledger: ClassVar[tuple[str, ...]] = ("gamma",)

    alpha: Annotated[float, positive, "strength α of the dynamic regularizer"] = 0.1

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(w, tree.zeros(w), num_clients)

    def init_client(self, w: Params) -> Client:
        return Client(tree.zeros(w))

    def broadcast(self, server: Server) -> Payload:
        return server.w

    def local_update(
        self, task: Task, client: Client, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """v ← v − η(g(v) − γ_i + α(v − w)), then γ_i ← γ_i − α(v − w)."""
        w, alpha = payload, self.alpha

        def step(v: Params, batch: Batch) -> Params:
            return tree.map(
                lambda v, g, c, w: v - round.lr * (g - c + alpha * (v - w)),
                v, task.grad(v, batch), client.gamma, w,
            )  # fmt: skip

        difference = tree.sub(scan(step, w, data.epochs(round.epochs)), w)
        return Client(tree.map(lambda c, d: c - alpha * d, client.gamma, difference)), difference

    def book(self, client: Client, upload: Payload, share: float) -> Client:
        """γ_i ← γ_i − share·α(v − w)."""
        return Client(tree.map(lambda c, d: c - share * (self.alpha * d), client.gamma, upload))

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        """h ← h − α/M Σ_S (v_i − w), then w ← mean_S v_i − h/α."""
        share = self.alpha * cohort_size / server.num_clients
        h = tree.map(lambda h, d: h - share * d, server.h, mean_upload)
        w = tree.map(lambda w, d, h: w + d - h / self.alpha, server.w, mean_upload, h)
        return Server(w, h, server.num_clients)

    def resize(self, server: Server, num_clients: int, leaving: Client | None = None) -> Server:
        """h is the mean of the γ_i and stays it."""
        h = tree.remean(server.h, server.num_clients, num_clients, leaving and leaving.gamma)
        return Server(server.w, h, num_clients)

    def global_model(self, server: Server) -> Params:
        return server.w

    def personal_model(self, task: Task, client: Client, payload: Params, data: LocalData) -> Params:
        return payload
