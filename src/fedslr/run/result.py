"""The result of a run: its figures, its models and its folder."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedslr.core import factored
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, FedslrWarning, suggest
from fedslr.core.types import Params, Payload
from fedslr.data.federation import Federation
from fedslr.engine import contract
from fedslr.engine.rounds import Simulation
from fedslr.storage.statistics import ACCURACY, Headline, headline_of
from fedslr.tasks.scoring import Scorer


class Result:
    """The figures, the models and, if one was asked for, the folder of a run.

    Methods that take a client accept its number, or its name if the federation has names.

    Attributes:
        summary: The figures of the run, as `summary.json` holds them.
        records: A dictionary per round, as the lines of `metrics.jsonl` hold them.
        out: The folder of the run, or None.
    """

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
        s, metric = self.summary, self.headline
        score = s[metric.name]
        return (
            f"<{s['algorithm']} on {s['dataset']}, {s['rounds']} rounds: "
            f"{'' if metric == ACCURACY else metric.words + ' '}personal models {metric.text(score['personal'])}, "
            f"global model {metric.text(score['global'])}>"
        )

    @property
    def headline(self) -> Headline:
        """The metric that stands for the others: its name, its direction and whether it is a share."""
        return headline_of(self.summary)

    @property
    def scorer(self) -> Scorer:
        """The losses and metrics of the run's evaluations."""
        return self._simulation.state.work.scorer

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

    def number_of(self, client: int | str) -> int:
        """Return the number of a client that is given by its number or its name.

        Raises:
            FedslrError: There is no such client, or another process of this run holds it.
        """
        names, known = list(self.federation.client_names or ()), self._simulation.num_clients
        number = names.index(client) if client in names else client
        if number not in range(known):
            raise FedslrError(f"client: got {client!r}, expected a whole number from 0 to {known - 1}")
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


def find_client(text: str, federation: Federation | None = None) -> int:
    """Return the number of a client that a command names by its number, or by its name, which may be a number too."""
    names = list(federation.client_names or ()) if federation else []
    named = names.index(text) if text in names else None
    if text.isdecimal() and (named is None or int(text) < len(names)):
        if named not in (None, int(text)):
            chosen = f"--client {text}: taken as a number; the client of that name is client {named}"
            warnings.warn(chosen, FedslrWarning, stacklevel=2)
        if federation and int(text) >= len(federation.clients):
            last = len(federation.clients) - 1
            raise FedslrError(f"--client: got {text}, expected a whole number from 0 to {last}, or a client's name")
        return int(text)
    if named is None:
        raise FedslrError(f"--client: got '{text}', expected a number, or a client's name; {suggest(text, names)}")
    return named
