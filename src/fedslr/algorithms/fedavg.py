"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (AISTATS 2017)."""

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


@dataclass(frozen=True)
class FedAvg(Algorithm[Server, tuple[()]]):
    """Local SGD, then the mean of the models weighted by the number of examples."""

    name: ClassVar[str] = "fedavg"

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(w)

    def init_client(self, w: Params) -> tuple[()]:
        return ()

    def broadcast(self, server: Server) -> Payload:
        return server.w

    def local_update(
        self, task: Task, client: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[tuple[()], Payload]:
        def step(v: Params, batch: Batch) -> Params:
            return tree.map(lambda v, g: v - round.lr * g, v, task.grad(v, batch))

        v = scan(step, payload, data.epochs(round.epochs))
        return (), tree.sub(v, payload)

    def weight(self, num_examples: int) -> float:
        return float(num_examples)

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        return Server(tree.add(server.w, mean_upload))

    def global_model(self, server: Server) -> Params:
        return server.w

    def personal_model(self, task: Task, client: tuple[()], payload: Params, data: LocalData) -> Params:
        return payload
