"""Methods of a person's own, for the tests of deployments: some work, and the others have one mistake each."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

import fedslr
from fedslr.core import tree


@dataclass(frozen=True)
class Half(fedslr.FedAvg):
    """The server goes half the way."""

    name: ClassVar[str] = "half"

    def aggregate(self, server, ledger, mean_upload, round):
        return super().aggregate(server, ledger, tree.map(lambda d: 0.5 * d, mean_upload), round)


@dataclass(frozen=True)
class Noisy(fedslr.FedAvg):
    """The server adds noise."""

    name: ClassVar[str] = "noisy"

    def aggregate(self, server, ledger, mean_upload, round):
        noise = tree.map(lambda d: d + 0.3 * torch.randn_like(d), mean_upload)
        return super().aggregate(server, ledger, noise, round)


@dataclass(frozen=True)
class Addressing(fedslr.FedAvg):
    """Every client is sent the weights scaled by its number."""

    name: ClassVar[str] = "addressing"

    def addressed(self, payload, address, number):
        return tree.map(lambda x: x * (1 + number / 10), payload)


class Models(NamedTuple):
    w: dict[str, torch.Tensor]
    own: dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Attentive(fedslr.FedAvg):
    """Like FedAMP: the server keeps a model for every client, pulls the models together, and sends each its own."""

    name: ClassVar[str] = "attentive"
    has_global_model: ClassVar[bool] = False
    server_sees: ClassVar[Any] = "each"

    def init_server(self, w):
        return Models(w, {})

    def broadcast(self, server, ledger):
        return {"w": server.w, "own": server.own}

    def addressed(self, payload, address, number):
        return payload["own"].get(str(number), payload["w"])

    def aggregate(self, server, ledger, each, round):
        trained = {n: tree.add(server.own.get(str(n), server.w), upload) for n, upload in each.items()}
        mean = tree.mean(list(trained.values()))
        pulled = {str(n): tree.map(lambda v, m: v + 0.3 * (m - v), v, mean) for n, v in trained.items()}
        return Models(server.w, {**server.own, **pulled})

    def shared(self, payload):
        return payload["w"]

    def personal_model(self, problem, client, payload, data):
        return payload

    def deployed(self, client, payload):
        return payload


@dataclass(frozen=True)
class Exploding(fedslr.FedSLR):
    """Its personal part diverges in the first round."""

    name: ClassVar[str] = "exploding"

    def personalize(self, problem, client, payload, data, round):
        if round.number == 0:
            return type(client)(tree.map(lambda x: x + float("inf"), client.p))
        return super().personalize(problem, client, payload, data, round)


@dataclass(frozen=True)
class Weighted(fedslr.FedDyn):
    """FedDyn whose clients count by their examples."""

    name: ClassVar[str] = "weighted"

    def weight(self, num_examples):
        return float(num_examples)


@dataclass(frozen=True)
class Patient(fedslr.FedSLR):
    """Trains the personal part of a round once a file is written, for the rounds that the environment names."""

    name: ClassVar[str] = "patient"

    def personalize(self, problem, client, payload, data, round):
        named = os.environ.get("AWAITED_FILES")
        awaited = json.loads(Path(named).read_text()).get(str(round.number)) if named else None
        while awaited and not (Path(awaited).exists() and Path(awaited).stat().st_size):
            time.sleep(0.05)
        return super().personalize(problem, client, payload, data, round)


@dataclass(frozen=True)
class Forgetful(Half):
    """A state that is no NamedTuple could not be stored."""

    name: ClassVar[str] = "forgetful"

    def init_client(self, w):
        return {"m": w}


@dataclass(frozen=True)
class Negative(Half):
    name: ClassVar[str] = "negative"

    def weight(self, num_examples):
        return -1.0


@dataclass(frozen=True)
class Diverging(Half):
    name: ClassVar[str] = "diverging"

    def aggregate(self, server, ledger, mean_upload, round):
        return super().aggregate(server, ledger, tree.map(lambda d: d * float("nan"), mean_upload), round)


@dataclass(frozen=True)
class Singular(Half):
    name: ClassVar[str] = "singular"

    def aggregate(self, server, ledger, mean_upload, round):
        raise torch.linalg.LinAlgError("it does not converge")


@dataclass(frozen=True)
class Broken(Half):
    name: ClassVar[str] = "broken"

    def aggregate(self, server, ledger, mean_upload, round):
        return server.nothing
