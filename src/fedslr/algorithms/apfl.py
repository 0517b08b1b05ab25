"""APFL: Deng et al., Adaptive Personalized Federated Learning (2020), with a fixed mixing weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedslr.algorithms.averaged import Averaged, OwnModel, PersonalModel
from fedslr.core import tree
from fedslr.core.algorithm import Phases
from fedslr.core.problem import Problem
from fedslr.core.scan import scan
from fedslr.core.schema import share
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


@dataclass(frozen=True)
class APFL(OwnModel, Averaged[PersonalModel, tuple[()]]):
    """A personal model that mixes the client's local model with the global model."""

    name: ClassVar[str] = "apfl"
    plain_sgd: ClassVar[Phases] = ("global",)

    alpha: Annotated[float, share, "share α of the local model in the mixture"] = 0.5

    def mix(self, u: Params, v: Params) -> Params:
        """αu + (1 − α)v."""
        return tree.map(lambda u, v: self.alpha * u + (1 - self.alpha) * v, u, v)

    def local_update(
        self, problem: Problem, client: PersonalModel, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[PersonalModel, Payload]:
        """v ← v − η g(v), then on the same batch, with the new v: u ← u − η(α∇f(αu + (1 − α)v) + wd·u)."""
        lr, wd, alpha = round.lr, problem.weight_decay, self.alpha

        def step(models: tuple[Params, Params], batch: Batch) -> tuple[Params, Params]:
            v, u = models
            v = tree.map(lambda v, g: v - lr * (g + wd * v), v, problem.loss_grad(v, batch))
            u = tree.map(lambda u, g: u - lr * (alpha * g + wd * u), u, problem.loss_grad(self.mix(u, v), batch))
            return v, u

        v, u = scan(step, (payload, client.u), data.epochs(round.epochs))
        return PersonalModel(u), tree.sub(v, payload)

    def personal_model(self, problem: Problem, client: PersonalModel, payload: Params, data: LocalData) -> Params:
        return self.mix(client.u, payload)

    def deployed(self, client: PersonalModel, payload: Payload) -> Payload:
        return {"u": client.u, "w": payload}
