"""Local training alone: the baseline that every federation has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedslr.algorithms.averaged import PersonalModel
from fedslr.core.algorithm import Algorithm, LedgerChange
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round


@dataclass(frozen=True)
class Local(Algorithm[tuple[()], PersonalModel, tuple[()]]):
    """Every sampled client trains its own model; nothing travels."""

    name: ClassVar[str] = "local"
    has_global_model: ClassVar[bool] = False

    def init_server(self, w: Params) -> tuple[()]:
        return ()

    def init_client(self, w: Params) -> PersonalModel:
        return PersonalModel(w)

    def broadcast(self, server: tuple[()], ledger: tuple[()]) -> Payload:
        return {}

    def local_update(
        self,
        problem: Problem,
        client: PersonalModel,
        ledger: tuple[()],
        payload: Payload,
        data: LocalData,
        round: Round,
    ) -> tuple[PersonalModel, Payload]:
        return PersonalModel(descend(problem, client.u, data.epochs(round.epochs), round)), {}

    def aggregate(self, server: tuple[()], ledger: LedgerChange, mean_upload: Any, round: Round) -> tuple[()]:
        return ()

    def personal_model(self, problem: Problem, client: PersonalModel, payload: Payload, data: LocalData) -> Params:
        return client.u

    def deployed(self, client: PersonalModel, payload: Payload) -> Payload:
        return {"u": client.u}
