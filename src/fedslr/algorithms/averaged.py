"""The server that most methods share: it holds a model and adds the mean upload to it."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm, Client, Ledger, LedgerChange
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round


class Server(NamedTuple):
    w: Params


class PersonalModel(NamedTuple):
    """The state of a client that keeps a model, or a part of one, to itself."""

    u: Params


class Averaged(Algorithm[Server, Client, Ledger], Generic[Client, Ledger]):
    """The server adds the mean upload to its model; clients keep nothing and use that model as it is."""

    def init_server(self, w: Params) -> Server:
        return Server(w)

    def init_client(self, w: Params) -> Any:
        return ()

    def broadcast(self, server: Server, ledger: Ledger) -> Payload:
        return server.w

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← w + mean Δ."""
        return Server(tree.add(server.w, mean_upload))

    def personal_model(self, problem: Problem, client: Client, payload: Payload, data: LocalData) -> Params:
        return self.shared(payload)
