"""Methods that divide the layers: some are shared, the others stay with the client.

FedPer: Arivazhagan et al., Federated Learning with Personalization Layers (2019).
FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning (ICML 2021).
LG-FedAvg: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations (2020).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.problem import Task
from fedslr.core.scan import scan
from fedslr.core.schema import countable_from_zero
from fedslr.core.types import Batch, LocalData, Params, Payload, Round


def split_head(w: Params) -> tuple[Params, Params]:
    """The body and the head, which is the module that holds the model's last two-dimensional weight."""
    matrices = [name for name, x in w.items() if x.ndim == 2]
    if not matrices:
        raise FedslrError("model: it has no linear layer, which this method needs as the head")
    module = matrices[-1].rpartition(".")[0]
    head = {k: x for k, x in w.items() if k.rpartition(".")[0] == module}
    body = {k: x for k, x in w.items() if k not in head}
    if not body:
        raise FedslrError("model: it has only one layer, so this method has nothing to divide")
    return body, head


class Server(NamedTuple):
    shared: Params


class Client(NamedTuple):
    own: Params


class _Divided(Algorithm[Server, Client]):
    """Part of the layers is shared by a plain mean, the rest is the client's own; there is no whole global model."""

    @abstractmethod
    def divide(self, w: Params) -> tuple[Params, Params]:
        """The shared and the own part of a model."""

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(self.divide(w)[0])

    def init_client(self, w: Params) -> Client:
        return Client(self.divide(w)[1])

    def broadcast(self, server: Server) -> Payload:
        return server.shared

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        return Server(tree.add(server.shared, mean_upload))

    def global_model(self, server: Server) -> None:
        return None

    def received_model(self, payload: Payload) -> None:
        return None

    def personal_model(self, task: Task, client: Client, payload: Params, data: LocalData) -> Params:
        return {**payload, **client.own}

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return {**payload, **client.own}


@dataclass(frozen=True)
class FedRep(_Divided):
    """A shared body and a personal last layer, trained one after the other."""

    name: ClassVar[str] = "fedrep"

    head_epochs: Annotated[int, countable_from_zero, "local passes on the head, before those on the body"] = 1

    def divide(self, w: Params) -> tuple[Params, Params]:
        return split_head(w)

    def local_update(
        self, task: Task, client: Client, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """The head with the body frozen, then the body with the head frozen, both with g."""

        def fit_head(head: Params, batch: Batch) -> Params:
            return tree.map(lambda h, g: h - round.lr * g, head, task.grad(head, batch, frozen=payload))

        head = scan(fit_head, client.own, data.epochs(self.head_epochs, phase=0))

        def fit_body(body: Params, batch: Batch) -> Params:
            return tree.map(lambda b, g: b - round.lr * g, body, task.grad(body, batch, frozen=head))

        body = scan(fit_body, payload, data.epochs(round.epochs, phase=1))
        return Client(head), tree.sub(body, payload)


class _Together(_Divided):
    """All layers are trained together."""

    def local_update(
        self, task: Task, client: Client, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        def step(v: Params, batch: Batch) -> Params:
            return tree.map(lambda v, g: v - round.lr * g, v, task.grad(v, batch))

        v = scan(step, {**client.own, **payload}, data.epochs(round.epochs))
        return Client({k: v[k] for k in client.own}), {k: v[k] - payload[k] for k in payload}


@dataclass(frozen=True)
class FedPer(_Together):
    """A shared body and a personal last layer, trained together.

    The published code of FedSLR's authors runs this by the name of FedRep.
    """

    name: ClassVar[str] = "fedper"

    def divide(self, w: Params) -> tuple[Params, Params]:
        return split_head(w)


@dataclass(frozen=True)
class LGFedAvg(_Together):
    """A personal body and a shared last layer, trained together."""

    name: ClassVar[str] = "lgfedavg"

    def divide(self, w: Params) -> tuple[Params, Params]:
        body, head = split_head(w)
        return head, body
