"""Per-FedAvg, first-order form.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach
(NeurIPS 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedslr.algorithms.fedavg import FedAvg
from fedslr.core import tree
from fedslr.core.algorithm import Phases
from fedslr.core.problem import Problem
from fedslr.core.scan import scan
from fedslr.core.schema import positive
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """A global model that becomes a good personal model after one epoch of SGD."""

    name: ClassVar[str] = "perfedavg"
    plain_sgd: ClassVar[Phases] = ("global",)

    alpha: Annotated[float, positive, "step size α of the adaptation; it does not decay"] = 0.01
    beta: Annotated[float, positive, "step size β of the meta update; it decays as lr does"] = 0.001

    def local_update(
        self, problem: Problem, client: Any, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[Any, Payload]:
        """ṽ = v − α∇f(v; b), then v ← v − β(∇f(ṽ; b') + wd·v), where b' is the next batch of the same epoch."""
        beta, wd = self.beta * round.decay, problem.weight_decay

        def step(v: Params, batches: tuple[Batch, Batch]) -> Params:
            adapted = tree.map(lambda v, g: v - self.alpha * g, v, problem.loss_grad(v, batches[0]))
            return tree.map(lambda v, g: v - beta * (g + wd * v), v, problem.loss_grad(adapted, batches[1]))

        return client, tree.sub(scan(step, payload, data.pairs(round.epochs)), payload)

    def personal_model(self, problem: Problem, client: Any, payload: Params, data: LocalData) -> Params:
        """Run one epoch of plain SGD with step α, without weight decay, on the client's training data."""

        def step(v: Params, batch: Batch) -> Params:
            return tree.map(lambda v, g: v - self.alpha * g, v, problem.loss_grad(v, batch))

        return scan(step, payload, data.epochs(1))
