"""Methods that divide the layers: clients share some layers and keep the others to themselves.

FedPer: Arivazhagan et al., Federated Learning with Personalization Layers (2019).
FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning (ICML 2021).
LG-FedAvg: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedslr.algorithms.averaged import Averaged, PersonalModel, Server
from fedslr.core import tree
from fedslr.core.errors import FedslrError
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.schema import countable_from_zero
from fedslr.core.types import LocalData, Params, Payload, Round


def split_head(w: Params) -> tuple[Params, Params]:
    """Return the body and the head of a model. The head is the module with the model's last two-dimensional weight."""
    matrices = [name for name, x in w.items() if x.ndim == 2]
    if not matrices:
        raise FedslrError("model: it has no linear layer that could be the head; choose another model")
    module = matrices[-1].rpartition(".")[0]
    head = {k: x for k, x in w.items() if k.rpartition(".")[0] == module}
    body = {k: x for k, x in w.items() if k not in head}
    if not body:
        raise FedslrError("model: it has only one layer, which cannot be divided; choose a deeper model")
    return body, head


@dataclass(frozen=True)
class FedPer(Averaged[PersonalModel, tuple[()]]):
    """A shared body and a personal last layer, trained together.

    The server averages the shared layers, and every client keeps the others. The published code of FedSLR's authors
    calls this method FedRep.
    """

    name: ClassVar[str] = "fedper"
    has_global_model: ClassVar[bool] = False

    def divide(self, w: Params) -> tuple[Params, Params]:
        """Return the shared layers and the client's own layers of a model."""
        return split_head(w)

    def init_server(self, w: Params) -> Server:
        return Server(self.divide(w)[0])

    def init_client(self, w: Params) -> PersonalModel:
        return PersonalModel(self.divide(w)[1])

    def local_update(
        self, problem: Problem, client: PersonalModel, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[PersonalModel, Payload]:
        """v ← v − η g(v), with v all layers; the upload has the shared layers only."""
        v = descend(problem, {**client.u, **payload}, data.epochs(round.epochs), round)
        return PersonalModel({k: v[k] for k in client.u}), {k: v[k] - payload[k] for k in payload}

    def personal_model(self, problem: Problem, client: PersonalModel, payload: Params, data: LocalData) -> Params:
        return {**payload, **client.u}

    def deployed(self, client: PersonalModel, payload: Payload) -> Payload:
        return {**payload, **client.u}


@dataclass(frozen=True)
class FedRep(FedPer):
    """A shared body and a personal last layer, trained one after the other."""

    name: ClassVar[str] = "fedrep"

    head_epochs: Annotated[int, countable_from_zero, "local passes on the head, before those on the body"] = 1

    def local_update(
        self, problem: Problem, client: PersonalModel, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[PersonalModel, Payload]:
        """v ← v − η g(v): first for the head with the body frozen, then for the body with the head frozen."""
        head = descend(problem, client.u, data.epochs(self.head_epochs, phase=0), round, frozen=payload)
        body = descend(problem, payload, data.epochs(round.epochs, phase=1), round, frozen=head)
        return PersonalModel(head), tree.sub(body, payload)


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """A personal body and a shared last layer, trained together."""

    name: ClassVar[str] = "lgfedavg"

    def divide(self, w: Params) -> tuple[Params, Params]:
        body, head = split_head(w)
        return head, body
