"""Base classes that many methods share."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm, Client, Ledger, LedgerChange
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round


class Server(NamedTuple):
    """The state of a server that holds one model."""

    w: Params


class PersonalModel(NamedTuple):
    """The state of a client that keeps a model, or some layers of one, to itself."""

    u: Params


class Averaged(Algorithm[Server, Client, Ledger], Generic[Client, Ledger]):
    """A method whose server adds the mean upload to its model. By default clients keep nothing and use that model.

    Subclasses write `local_update`; the upload is the difference `v − w`.
    """

    def init_server(self, w: Params) -> Server:
        return Server(w)

    def init_client(self, w: Params) -> Any:
        return ()

    def broadcast(self, server: Server, ledger: Ledger) -> Payload:
        return server.w

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← w + mean Δ."""
        return Server(tree.add(server.w, mean_upload))

    @classmethod
    def averages(cls) -> bool:
        return cls.aggregate is Averaged.aggregate

    def personal_model(self, problem: Problem, client: Client, payload: Payload, data: LocalData) -> Params:
        return self.shared(payload)


class OwnModel(Algorithm[Any, PersonalModel, tuple[()]]):
    """A method whose clients each keep a model u_i of their own and use it as their personal model.

    Every u_i starts as the initial model. Name this class before `Averaged` or `FedAvg` among the bases.
    """

    def init_client(self, w: Params) -> PersonalModel:
        return PersonalModel(w)

    def personal_model(self, problem: Problem, client: PersonalModel, payload: Payload, data: LocalData) -> Params:
        return client.u

    def deployed(self, client: PersonalModel, payload: Payload) -> Payload:
        return {"u": client.u}
