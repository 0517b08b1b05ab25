"""The result of a run: its figures, its models and its folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedslr.core import factored
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.types import Params, Payload
from fedslr.data.federation import Federation
from fedslr.engine import contract
from fedslr.engine.rounds import Simulation
from fedslr.report.number_text import percent


class Result:
    """The figures, the models and, if one was asked for, the folder of a run."""

    def __init__(
        self,
        simulation: Simulation,
        records: list[dict[str, Any]],
        summary: dict[str, Any],
        out: Path | None = None,
    ) -> None:
        self._simulation = simulation
        self.records = records
        self.summary = summary
        self.out = simulation.folder.path if simulation.folder else out

    def __repr__(self) -> str:
        accuracy, s = self.summary["accuracy"], self.summary
        return (
            f"<{s['algorithm']} on {s['dataset']}, {s['rounds']} rounds: "
            f"personal models {percent(accuracy['personal'])}, global model {percent(accuracy['global'])}>"
        )

    @property
    def algorithm(self) -> Algorithm[Any, Any, Any]:
        return self._simulation.algorithm

    @property
    def federation(self) -> Federation:
        return self._simulation.federation

    @property
    def global_params(self) -> Params:
        """The global model in full; for methods without one, the part the server holds."""
        state = self._simulation.state
        shared = state.global_model()
        return dict(contract.own(factored.multiply_out(state.delivery.shared()) if shared is None else shared))

    def personal_params(self, client: int) -> dict[str, Tensor]:
        """The parameters of one client's personal model."""
        return dict(contract.own(self._simulation.personal_params(self._checked(client))))

    def personal_parts(self, client: int) -> Payload:
        """The personal model as the client stores it: factors, a sparse part or dense parameters."""
        number, state = self._checked(client), self._simulation.state
        member = state.roster.member(number)
        return self.algorithm.deployed(member.client, state.delivery.compact(number, member))

    def global_parts(self) -> Payload:
        """The global model as the server holds it: factors where the method has them."""
        return self._simulation.state.delivery.shared()

    def _checked(self, client: int) -> int:
        known = self._simulation.num_clients
        if client not in range(known):
            raise FedslrError(f"client: got {client!r}, expected a whole number from 0 to {known - 1}")
        group = self._simulation.group
        if group.owner(client) != group.rank:
            raise FedslrError(f"client: {client} lives in the process of rank {group.owner(client)}; ask there")
        return int(client)

    def personal_model(self, client: int) -> nn.Module:
        """One client's personal model, ready to use."""
        return self._with_params(self.personal_params(client))

    def global_model(self) -> nn.Module:
        """The global model, ready to use; an error for a method that has none."""
        if not self.has_global_model:
            raise FedslrError(f"{self.algorithm.name} has no global model; expected personal_model(client)")
        return self._with_params(self.global_params)

    @property
    def rounds_left(self) -> int:
        """The rounds that the run was stopped before; 0 if it is finished."""
        return max(0, self._simulation.settings.rounds - self._simulation.state.done)

    @property
    def has_global_model(self) -> bool:
        return self.algorithm.has_global_model

    def _with_params(self, params: Params) -> nn.Module:
        model = copy.deepcopy(self._simulation.problem.model)
        model.load_state_dict(params, strict=False)
        return model.eval()
