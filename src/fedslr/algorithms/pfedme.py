"""pFedMe: T Dinh et al., Personalized Federated Learning with Moreau Envelopes (NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedslr.algorithms.averaged import Averaged, OwnModel, PersonalModel, Server
from fedslr.core import tree
from fedslr.core.algorithm import LedgerChange, Phases
from fedslr.core.problem import Problem
from fedslr.core.scan import scan
from fedslr.core.schema import countable, fraction, non_negative, positive
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


@dataclass(frozen=True)
class PFedMe(OwnModel, Averaged[PersonalModel, tuple[()]]):
    """Personal models θ_i that a Moreau envelope keeps near the global model."""

    name: ClassVar[str] = "pfedme"
    plain_sgd: ClassVar[Phases] = ("global",)

    lam: Annotated[float, non_negative, "λ: strength of the pull ½λ‖θ − w‖² to the global model"] = 15.0
    inner_steps: Annotated[int, countable, "gradient steps K towards θ on every batch"] = 5
    inner_lr: Annotated[float, positive, "step size η' of these steps; it does not decay"] = 0.01
    beta: Annotated[float, fraction, "share β of the clients' mean in the new global model"] = 1.0

    def local_update(
        self, problem: Problem, client: PersonalModel, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[PersonalModel, Payload]:
        """On every batch K steps θ ← θ − η'(g(θ) + λ(θ − w)), then w ← w − ηλ(w − θ)."""

        def step(models: tuple[Params, Params], batch: Batch) -> tuple[Params, Params]:
            w, theta = models
            for _ in range(self.inner_steps):
                g = problem.grad(theta, batch)
                theta = tree.map(lambda t, g, w: t - self.inner_lr * (g + self.lam * (t - w)), theta, g, w)
            return tree.map(lambda w, t: w - round.lr * self.lam * (w - t), w, theta), theta

        w, theta = scan(step, (payload, client.u), data.epochs(round.epochs))
        return PersonalModel(theta), tree.sub(w, payload)

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← (1 − β)w + β·mean."""
        return super().aggregate(server, ledger, tree.map(lambda d: self.beta * d, mean_upload), round)
