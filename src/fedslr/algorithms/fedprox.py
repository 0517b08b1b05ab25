"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks (MLSys 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedslr.algorithms.fedavg import FedAvg
from fedslr.core import tree
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.schema import non_negative
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose local steps are pulled back to the global model."""

    name: ClassVar[str] = "fedprox"

    mu: Annotated[float, non_negative, "strength μ of the pull ½μ‖v − w‖²"] = 0.01

    def local_update(
        self, task: Task, client: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[tuple[()], Payload]:
        """v ← v − η(g(v) + μ(v − w))."""

        def step(v: Params, batch: Batch) -> Params:
            pull = lambda v, g, w: v - round.lr * (g + self.mu * (v - w))  # noqa: E731
            return tree.map(pull, v, task.grad(v, batch), payload)

        return (), tree.sub(scan(step, payload, data.epochs(round.epochs)), payload)
