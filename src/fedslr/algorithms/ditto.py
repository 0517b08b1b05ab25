"""Ditto: Li et al., Fair and Robust Federated Learning Through Personalization (ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedslr.algorithms.averaged import OwnModel, PersonalModel
from fedslr.algorithms.fedavg import FedAvg
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.schema import non_negative
from fedslr.core.types import LocalData, Params, Round


@dataclass(frozen=True)
class Ditto(OwnModel, FedAvg):
    """FedAvg, and beside it a personal model per client that is kept near the global one."""

    name: ClassVar[str] = "ditto"

    lam: Annotated[float, non_negative, "λ: strength of the pull of personal models to the global one"] = 0.1

    def personalize(self, problem: Problem, client: Any, payload: Params, data: LocalData, round: Round) -> Any:
        """u_i ← u_i − η(g(u_i) + λ(u_i − w)) for the personal epochs."""
        pull = lambda g, u, w: g + self.lam * (u - w)  # noqa: E731
        batches = data.epochs(round.personal_epochs, phase=1)
        return PersonalModel(descend(problem, client.u, batches, round, correct=pull, given=(payload,)))
