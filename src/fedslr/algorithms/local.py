"""Local training alone: the baseline that every federated method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedslr.algorithms.averaged import OwnModel, PersonalModel
from fedslr.core.algorithm import LedgerChange
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round


@dataclass(frozen=True)
class Local(OwnModel):
    """Every sampled client trains its own model; nothing travels."""

    name: ClassVar[str] = "local"
    has_global_model: ClassVar[bool] = False

    def init_server(self, w: Params) -> tuple[()]:
        return ()

    def broadcast(self, server: tuple[()], ledger: tuple[()]) -> Payload:
        return {}

    def local_update(
        self, problem: Problem, client: PersonalModel, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[PersonalModel, Payload]:
        """u_i ← u_i − η g(u_i)."""
        return PersonalModel(descend(problem, client.u, data.epochs(round.epochs), round)), {}

    def aggregate(self, server: tuple[()], ledger: LedgerChange, mean_upload: Any, round: Round) -> tuple[()]:
        return ()
