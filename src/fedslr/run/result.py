"""The result of a run: its figures, its models and its folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.types import Params, Payload
from fedslr.data.federation import Federation
from fedslr.engine import contract
from fedslr.engine.rounds import Simulation
from fedslr.report import percent


class Result:
    """What a run leaves: its figures, its models and, if one was asked for, its folder."""

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
    def algorithm(self) -> Algorithm[Any, Any]:
        return self._simulation.algorithm

    @property
    def federation(self) -> Federation:
        return self._simulation.federation

    @property
    def global_params(self) -> Params:
        """The global model in full; for methods without one, the part the server holds."""
        shared = self._simulation.algorithm.global_model(self._simulation.server)
        return dict(contract.own(shared if shared is not None else self._simulation.payload))

    def personal_params(self, client: int) -> dict[str, Tensor]:
        """The parameters of one client's personal model."""
        return dict(contract.own(self._simulation.personal_params(self._checked(client))))

    def personal_parts(self, client: int) -> Payload:
        """What a client keeps of its personal model: factors, a sparse part, whatever the method holds."""
        state = self._simulation.state(self._checked(client))
        return self.algorithm.deployed(state, self._simulation.broadcast)

    def global_parts(self) -> Payload:
        """The global model as the server holds it: factors where the method has them."""
        return self.algorithm.shared(self._simulation.broadcast)

    def _checked(self, client: int) -> int:
        known = self._simulation.num_clients
        if not hasattr(client, "__index__") or not 0 <= client < known:
            raise FedslrError(f"client: got {client!r}, expected a whole number from 0 to {known - 1}")
        group = self._simulation.group
        if group.owner(client) != group.rank:
            raise FedslrError(f"client: {client} lives in the process of rank {group.owner(client)}; ask there")
        return int(client)

    def personal_model(self, client: int) -> nn.Module:
        """One client's personal model, ready to use."""
        return self._filled(self.personal_params(client))

    def global_model(self) -> nn.Module:
        """The global model, ready to use; an error for a method that has none."""
        if not self.has_global_model:
            raise FedslrError(f"{self.algorithm.name} has no global model; expected personal_model(client)")
        return self._filled(self.global_params)

    @property
    def rounds_left(self) -> int:
        """How many the run would still have gone on for; 0 if it came to its end."""
        return max(0, self._simulation.settings.rounds - self._simulation.done)

    @property
    def has_global_model(self) -> bool:
        return self.algorithm.global_model(self._simulation.server) is not None

    def _filled(self, params: Params) -> nn.Module:
        model = copy.deepcopy(self._simulation.task.model)
        model.load_state_dict(params, strict=False)
        return model.eval()
