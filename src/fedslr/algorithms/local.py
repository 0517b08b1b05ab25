"""Local training alone: the baseline every federation has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


class Client(NamedTuple):
    u: Params


@dataclass(frozen=True)
class Local(Algorithm[tuple[()], Client]):
    """Every sampled client trains its own model; nothing travels."""

    name: ClassVar[str] = "local"

    def init_server(self, w: Params, num_clients: int) -> tuple[()]:
        return ()

    def init_client(self, w: Params) -> Client:
        return Client(w)

    def broadcast(self, server: tuple[()]) -> Payload:
        return {}

    def local_update(
        self, task: Task, client: Client, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        def step(u: Params, batch: Batch) -> Params:
            return tree.map(lambda u, g: u - round.lr * g, u, task.grad(u, batch))

        return Client(scan(step, client.u, data.epochs(round.epochs))), {}

    def aggregate(self, server: tuple[()], mean_upload: Payload, cohort_size: int) -> tuple[()]:
        return ()

    def global_model(self, server: tuple[()]) -> None:
        return None

    def received_model(self, payload: Payload) -> None:
        return None

    def personal_model(self, task: Task, client: Client, payload: Payload, data: LocalData) -> Params:
        return client.u

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return {"u": client.u}
