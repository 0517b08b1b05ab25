"""Ditto: Li et al., Fair and Robust Federated Learning Through Personalization (ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from fedslr.algorithms.fedavg import FedAvg
from fedslr.core import tree
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.schema import non_negative
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


class Client(NamedTuple):
    u: Params
    """The personal model."""


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a personal model per client that is kept near the global one."""

    name: ClassVar[str] = "ditto"

    lam: Annotated[float, non_negative, "λ: strength of the pull of personal models to the global one"] = 0.1

    def init_client(self, w: Params) -> Any:
        return Client(w)

    def local_update(
        self, task: Task, client: Any, payload: Params, data: LocalData, round: Round
    ) -> tuple[Any, Payload]:
        """FedAvg's step, and u_i ← u_i − η(g(u_i) + λ(u_i − w)) for the personal epochs."""

        def personalize(u: Params, batch: Batch) -> Params:
            pull = lambda u, g, w: u - round.lr * (g + self.lam * (u - w))  # noqa: E731
            return tree.map(pull, u, task.grad(u, batch), payload)

        _, difference = super().local_update(task, (), payload, data, round)
        return Client(scan(personalize, client.u, data.epochs(round.personal_epochs, phase=1))), difference

    def personal_model(self, task: Task, client: Any, payload: Params, data: LocalData) -> Params:
        u: Params = client.u
        return u

    def deployed(self, client: Any, payload: Payload) -> Payload:
        return {"u": client.u}
