"""APFL: Deng et al., Adaptive Personalized Federated Learning (2020), with a fixed mixing weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.schema import share
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


class Server(NamedTuple):
    w: Params


class Client(NamedTuple):
    u: Params
    """The local model, one part of the personal mixture."""


@dataclass(frozen=True)
class APFL(Algorithm[Server, Client]):
    """A personal model that mixes a local and the global one."""

    name: ClassVar[str] = "apfl"

    alpha: Annotated[float, share, "share α of the local model in the mixture"] = 0.5

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(w)

    def init_client(self, w: Params) -> Client:
        return Client(w)

    def broadcast(self, server: Server) -> Payload:
        return server.w

    def mix(self, u: Params, v: Params) -> Params:
        """αu + (1 − α)v."""
        return tree.map(lambda u, v: self.alpha * u + (1 - self.alpha) * v, u, v)

    def local_update(
        self, task: Task, client: Client, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """v ← v − η g(v), then on the same batch with the new v: u ← u − η(α∇f(αu + (1 − α)v) + wd·u)."""
        lr, wd, alpha = round.lr, task.weight_decay, self.alpha

        def step(models: tuple[Params, Params], batch: Batch) -> tuple[Params, Params]:
            v, u = models
            v = tree.map(lambda v, g: v - lr * g, v, task.grad(v, batch))
            u = tree.map(lambda u, g: u - lr * (alpha * g + wd * u), u, task.loss_grad(self.mix(u, v), batch))
            return v, u

        v, u = scan(step, (payload, client.u), data.epochs(round.epochs))
        return Client(u), tree.sub(v, payload)

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        return Server(tree.add(server.w, mean_upload))

    def global_model(self, server: Server) -> Params:
        return server.w

    def personal_model(self, task: Task, client: Client, payload: Params, data: LocalData) -> Params:
        return self.mix(client.u, payload)

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return {"u": client.u, "w": payload}
