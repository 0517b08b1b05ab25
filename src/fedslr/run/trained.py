"""The models of a run, while it trains and afterwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedslr.core import factored
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, suggest
from fedslr.core.types import Params, Payload
from fedslr.data.federation import Federation
from fedslr.engine import contract
from fedslr.engine.rounds import Simulation


class TrainedModels:
    """The models of a run, made when they are asked for.

    A callback of `fedslr.run` receives the models of the round that has just finished. They are those of a later round
    if the callback keeps this object and asks it later. Methods that take a client accept its number, or its name if
    the federation has names.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    @property
    def algorithm(self) -> Algorithm[Any, Any, Any]:
        """The method of the run."""
        return self._simulation.algorithm

    @property
    def federation(self) -> Federation:
        """The clients' data."""
        return self._simulation.federation

    @property
    def has_global_model(self) -> bool:
        """Whether the method has a global model."""
        return self.algorithm.has_global_model

    @property
    def rounds_left(self) -> int:
        """The rounds that the run was stopped before; 0 if it is finished."""
        return max(0, self._simulation.settings.rounds - self._simulation.state.done)

    @property
    def global_params(self) -> Params:
        """The dense parameters of the global model; for a method without one, those that the server holds."""
        state = self._simulation.state
        shared = state.global_model()
        return dict(contract.private_copy(factored.multiply_out(state.delivery.shared()) if shared is None else shared))

    def personal_params(self, client: int | str) -> dict[str, Tensor]:
        """Return the dense parameters of one client's personal model."""
        return dict(contract.private_copy(self._simulation.personal_params(self.number_of(client))))

    def global_parts(self) -> Payload:
        """Return the global model as the server holds it: factors where the method has them."""
        return self._simulation.state.delivery.shared()

    def personal_parts(self, client: int | str) -> Payload:
        """Return the personal model as the client stores it: factors, a sparse part or dense parameters."""
        number, state = self.number_of(client), self._simulation.state
        member = state.roster.member(number)
        return self.algorithm.deployed(member.client, state.delivery.compact(number, member))

    def global_model(self) -> nn.Module:
        """Return the global model, ready to use.

        Raises:
            FedslrError: The method has no global model.
        """
        if not self.has_global_model:
            raise FedslrError(f"{self.algorithm.name} has no global model; expected personal_model(client)")
        return self._with_params(self.global_params)

    def personal_model(self, client: int | str) -> nn.Module:
        """Return one client's personal model, ready to use."""
        return self._with_params(self.personal_params(client))

    def sizes(self) -> dict[str, float]:
        """Return the parameters of the dense, the global and the personal models, as `summary["parameters"]` has them.

        `personal` is the mean over clients and `personal_std` the standard deviation.
        """
        return self._simulation.sizes().summary()

    def number_of(self, client: int | str) -> int:
        """Return the number of a client that is given by its number or its name.

        Raises:
            FedslrError: There is no such client, or another process of this run holds it.
        """
        names, known = list(self.federation.client_names or ()), self._simulation.num_clients
        number = names.index(client) if client in names else client
        if number not in range(known):
            raise FedslrError(f"client: got {client!r}, expected {known_clients(client, known, names)}")
        group = self._simulation.group
        if group.owner(int(number)) != group.rank:
            raise FedslrError(
                f"client: {client} belongs to rank {group.owner(int(number))}; call this function in that process"
            )
        return int(number)

    def _with_params(self, params: Params) -> nn.Module:
        model = copy.deepcopy(self._simulation.problem.model)
        model.load_state_dict(params, strict=False)
        return model.eval()


def known_clients(wrong: object, known: int | None, names: Sequence[str]) -> str:
    """Return the words for the clients that there are; `known` is their count if it is known."""
    numbers = "a whole number" if known is None else f"a whole number from 0 to {known - 1}"
    return f"{numbers}, or a client's name; {suggest(str(wrong), names)}" if names else numbers
