"""IFCA: Ghosh et al., An Efficient Framework for Clustered Federated Learning (NeurIPS 2020).

The mean of the uploads is enough for the server. An upload has zeros for every cluster that the client did not train,
and a one-hot vector that marks the cluster that it did train. The mean of these vectors tells the server how many
clients trained a cluster. Methods draw no random numbers, so model j starts as the initial model with the values of
every tensor shifted by j places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm, LedgerChange
from fedslr.core.optim import descend, mean_loss
from fedslr.core.problem import Problem
from fedslr.core.schema import countable
from fedslr.core.types import LocalData, Params, Payload, Round


class Server(NamedTuple):
    models: dict[str, Params]
    """The model of every cluster, by the cluster's number."""


@dataclass(frozen=True)
class IFCA(Algorithm[Server, tuple[()], tuple[()]]):
    """One model for every cluster of clients; a client trains the model with the lowest loss on its data."""

    name: ClassVar[str] = "ifca"
    has_global_model: ClassVar[bool] = False

    clusters: Annotated[int, countable, "number k of clusters"] = 4

    def init_server(self, w: Params) -> Server:
        return Server({str(j): tree.map(lambda x, j=j: torch.roll(x, j), w) for j in range(self.clusters)})

    def init_client(self, w: Params) -> tuple[()]:
        return ()

    def broadcast(self, server: Server, ledger: tuple[()]) -> Payload:
        """Return all models, and zeros in the shape of the upload's one-hot vector."""
        some = next(iter(server.models["0"].values()))
        return {"models": server.models, "choice": some.new_zeros(self.clusters)}

    def choose(self, problem: Problem, payload: Payload, data: LocalData) -> tuple[Tensor, Params]:
        """Return the one-hot vector of the cluster with the lowest mean loss on the client's data, and its model."""
        models = list(payload["models"].values())
        losses = torch.stack([mean_loss(problem, model, data, phase=1) for model in models])
        choice = one_hot(losses.argmin(), self.clusters).to(losses.dtype)
        return choice, tree.map(lambda *xs: torch.tensordot(choice.to(xs[0].dtype), torch.stack(xs), 1), *models)

    def local_update(
        self, problem: Problem, client: tuple[()], ledger: tuple[()], payload: Payload, data: LocalData, round: Round
    ) -> tuple[tuple[()], Payload]:
        """v ← v − η g(v) from the chosen model."""
        choice, w = self.choose(problem, payload, data)
        difference = tree.sub(descend(problem, w, data.epochs(round.epochs), round), w)
        models = {
            j: tree.map(lambda d, c=c: torch.where(c > 0, d, 0.0), difference)
            for j, c in zip(payload["models"], choice.unbind(), strict=True)
        }
        return (), {"models": models, "choice": choice}

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w_j ← w_j + Σ Δ_i / (number of clients that chose j)."""
        shares = dict(zip(server.models, mean_upload["choice"].unbind(), strict=True))

        def move(j: str, w: Params) -> Params:
            scale = torch.where(shares[j] > 0, 1 / shares[j], 0.0)
            return tree.map(lambda w, d: w + scale.to(d.dtype) * d, w, mean_upload["models"][j])

        return Server({j: move(j, w) for j, w in server.models.items()})

    def clipped(self, upload: Payload) -> Payload:
        """Return the differences. A scaled choice would cancel the bound when the server divides by it."""
        return {"models": upload["models"]}

    def personal_model(self, problem: Problem, client: tuple[()], payload: Payload, data: LocalData) -> Params:
        return self.choose(problem, payload, data)[1]

    def shared(self, payload: Payload) -> Payload:
        models: Payload = payload["models"]
        return models

    def deployed(self, client: tuple[()], payload: Payload) -> Payload:
        """Return one model. The choice needs the client's data, but all models have the same size."""
        model: Payload = payload["models"]["0"]
        return model
