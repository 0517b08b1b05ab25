"""FedAMP: Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data (AAAI 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch

from fedslr.algorithms.averaged import OwnModel, PersonalModel
from fedslr.core import tree
from fedslr.core.algorithm import LedgerChange
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.schema import non_negative, positive
from fedslr.core.types import LocalData, Params, Payload, Round


class Server(NamedTuple):
    start: Params
    """The initial model; the server sends it to clients that never trained."""
    models: dict[str, Params]
    """The last model of every client that trained, by the client's number."""
    clouds: dict[str, Params]
    """The mixture that the server sends to each of these clients."""


@dataclass(frozen=True)
class FedAMP(OwnModel):
    """Every client is drawn to its own mixture of all clients' models, in which similar models weigh more."""

    name: ClassVar[str] = "fedamp"
    has_global_model: ClassVar[bool] = False
    server_sees: ClassVar[Literal["mean", "each"]] = "each"

    alpha: Annotated[
        float, positive, "step size α of the mixing; α/σ times the number of clients should be at most 1"
    ] = 1e4
    sigma: Annotated[float, positive, "scale σ of squared distances between models"] = 1e6
    lam: Annotated[float, non_negative, "λ: strength of the pull λ/(2α)‖w − u_i‖² to the mixture"] = 1.0

    def init_server(self, w: Params) -> Server:
        return Server(w, {}, {})

    def broadcast(self, server: Server, ledger: tuple[()]) -> Payload:
        """Return all mixtures. `addressed` picks the one that a client is sent."""
        return {"start": server.start, **server.clouds}

    def addressed(self, payload: Payload, address: Payload, number: int) -> Payload:
        cloud: Payload = payload[str(number) if str(number) in payload else "start"]
        return cloud

    def local_update(
        self, problem: Problem, client: PersonalModel, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[PersonalModel, Payload]:
        """v ← v − η(g(v) + λ/α·(v − u_i)) from the client's own model; the upload is v − u_i."""
        pull = lambda g, v, cloud: g + self.lam / self.alpha * (v - cloud)  # noqa: E731
        v = descend(problem, client.u, data.epochs(round.epochs), round, correct=pull, given=(payload,))
        return PersonalModel(v), tree.sub(v, payload)

    def aggregate(
        self, server: Server, ledger: LedgerChange, mean_upload: Mapping[int, Params], round: Round
    ) -> Server:
        """w_i ← u_i + upload_i, then u_i ← w_i + Σ_j ξ_ij(w_j − w_i) with ξ_ij = α·exp(−‖w_i − w_j‖²/σ)/σ."""
        sent = self.broadcast(server, ())
        new = {str(i): tree.add(self.addressed(sent, {}, i), upload) for i, upload in mean_upload.items()}
        models = {**server.models, **new}
        return Server(server.start, models, {i: self.mixture(w, models) for i, w in models.items()})

    def mixture(self, w: Params, models: Mapping[str, Params]) -> Params:
        """Return the mixture u_i for the client whose model is w."""
        mixed = w
        for other in models.values():
            apart = tree.sub(other, w)
            weight = self.alpha / self.sigma * torch.exp(-tree.dot(apart, apart) / self.sigma)
            mixed = tree.map(lambda u, d, weight=weight: u + weight * d, mixed, apart)
        return mixed

    def shared(self, payload: Payload) -> Payload:
        return {}
