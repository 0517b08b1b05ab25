"""Methods, losses and selections of a person's own: right ones, and one for each mistake that the engines refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch

import fedslr
from fedslr.core import tree
from fedslr.core.optim import descend
from fedslr.core.schema import fraction, positive


class Own(NamedTuple):
    """The state of a client that keeps a model."""

    u: dict[str, Any]


class Gathered(NamedTuple):
    start: dict[str, Any]
    models: dict[str, Any]
    """The model that every client last made, by its number."""


@dataclass(frozen=True)
class Attentive(fedslr.Algorithm[Gathered, Own, tuple[()]]):
    """As in FedAMP, the server sees every model and draws each to those that are like it; clients are sent their own.

    The first edition of a client's cloud is the initial model.
    """

    name: ClassVar[str] = "attentive"
    has_global_model: ClassVar[bool] = False
    server_sees: ClassVar[Literal["mean", "each"]] = "each"
    pull: Annotated[float, positive, "strength with which a client is drawn to its cloud"] = 0.2

    def init_server(self, w):
        return Gathered(w, {})

    def init_client(self, w):
        return Own(w)

    def clouds(self, models):
        """Return m_i + Σ_j exp(−‖m_j − m_i‖²)·(m_j − m_i)/2M for every client i."""
        made = {}
        for number, own in models.items():
            cloud = own
            for other in models.values():
                apart = tree.sub(other, own)
                near = torch.exp(-tree.dot(apart, apart)) / (2 * len(models))
                cloud = {k: cloud[k] + near * apart[k] for k in cloud}
            made[number] = cloud
        return made

    def broadcast(self, server, ledger):
        return {"start": server.start, **self.clouds(server.models)}

    def addressed(self, payload, address, number):
        return payload.get(str(number), payload["start"])

    def local_update(self, problem, client, ledger, payload, data, round):
        drawn = lambda g, v, cloud: g + self.pull * (v - cloud)  # noqa: E731
        v = descend(problem, client.u, data.epochs(round.epochs), round, correct=drawn, given=(payload,))
        return Own(v), tree.sub(v, payload)

    def aggregate(self, server, ledger, mean_upload, round):
        clouds = self.clouds(server.models)
        new = {str(n): tree.add(clouds.get(str(n), server.start), u) for n, u in mean_upload.items()}
        return Gathered(server.start, {**server.models, **new})

    def personal_model(self, problem, client, payload, data):
        return client.u

    def shared(self, payload):
        return {}

    def deployed(self, client, payload):
        return client.u


class Clusters(NamedTuple):
    models: dict[str, Any]


@dataclass(frozen=True)
class Clustered(fedslr.Algorithm[Clusters, tuple[()], tuple[()]]):
    """As in IFCA, several models: a client trains the one that suits it best, and uploads say which one that was."""

    name: ClassVar[str] = "clustered"
    has_global_model: ClassVar[bool] = False
    clusters: Annotated[int, positive, "number of models"] = 4

    def init_server(self, w):
        models = {str(j): {k: x.flatten().roll(j).reshape(x.shape) for k, x in w.items()} for j in range(self.clusters)}
        return Clusters(models)

    def init_client(self, w):
        return ()

    def broadcast(self, server, ledger):
        some = next(iter(server.models["0"].values()))
        return {"models": server.models, "chosen": some.new_zeros(self.clusters)}

    def choose(self, problem, payload, data):
        """Return the model of least loss on the client's first batch, and a one at its place among zeros."""
        batch = data.first_batch(phase=1)
        losses = torch.stack([problem.loss(w, batch) for w in payload["models"].values()])
        places = torch.arange(self.clusters, device=losses.device)
        chosen = (places == losses.argmin()).to(losses.dtype)
        models = list(payload["models"].values())
        return {k: torch.tensordot(chosen, torch.stack([w[k] for w in models]), 1) for k in models[0]}, chosen

    def local_update(self, problem, client, ledger, payload, data, round):
        w, chosen = self.choose(problem, payload, data)
        moved = tree.sub(descend(problem, w, data.epochs(round.epochs), round), w)
        uploads = {j: {k: chosen[int(j)] * x for k, x in moved.items()} for j in payload["models"]}
        return client, {"models": uploads, "chosen": chosen}

    def aggregate(self, server, ledger, mean_upload, round):
        parts = {j: mean_upload["chosen"][int(j)].clamp_min(1e-12) for j in server.models}
        sums = mean_upload["models"]
        return Clusters({j: {k: x + sums[j][k] / parts[j] for k, x in w.items()} for j, w in server.models.items()})

    def personal_model(self, problem, client, payload, data):
        return self.choose(problem, payload, data)[0]

    def shared(self, payload):
        return payload["models"]

    def deployed(self, client, payload):
        return payload["models"]["0"]


@dataclass(frozen=True)
class Half(fedslr.FedAvg):
    """FedAvg whose server goes a share of the way."""

    name: ClassVar[str] = "half"
    share: Annotated[float, fraction, "of the way that the server goes"] = 0.5

    def aggregate(self, server, ledger, mean_upload, round):
        return super().aggregate(server, ledger, tree.map(lambda d: self.share * d, mean_upload), round)


def doubled(scores, labels):
    """A loss."""
    return 2 * torch.nn.functional.cross_entropy(scores, labels)


NOT_A_LOSS = 3


def first(rng, size, examples):
    """A selection."""
    return range(size)


# --- methods that change what they are given --------------------------------------------------------------------------


@dataclass(frozen=True)
class InPlace(fedslr.FedAvg):
    name: ClassVar[str] = "in-place"

    def local_update(self, problem, client, ledger, payload, data, round):
        before = {k: x.clone() for k, x in payload.items()}
        for batch in data.epochs(round.epochs):
            for k, g in problem.grad(payload, batch).items():
                payload[k] -= round.lr * g
        return (), tree.sub(payload, before)


@dataclass(frozen=True)
class Momentum(fedslr.FedAvg):
    """What a client keeps begins as the initial model and is changed in place; nothing comes of it."""

    name: ClassVar[str] = "momentum"

    def init_client(self, w):
        return Own(w)

    def local_update(self, problem, client, ledger, payload, data, round):
        for x in client.u.values():
            x *= 0.5
        return client, super().local_update(problem, (), ledger, payload, data, round)[1]


# --- mistakes, one of each that the engines refuse --------------------------------------------------------------------


class DictState(Half):
    name = "dict-state"

    def init_client(self, w):
        return {"w": w}


class Wrong(Half):
    """A `local_update` with one of the mistakes below."""

    name = "wrong"

    def local_update(self, problem, client, ledger, payload, data, round):
        client, upload = super().local_update(problem, client, ledger, payload, data, round)
        return self.spoil(client, upload)


class ListState(Wrong):
    def spoil(self, client, upload):
        return [upload], upload


class NoPair(Wrong):
    def spoil(self, client, upload):
        return upload


class FewKeys(Wrong):
    def spoil(self, client, upload):
        return client, dict(list(upload.items())[1:])


class OtherShapes(Wrong):
    def spoil(self, client, upload):
        return client, {k: x.sum(0) for k, x in upload.items()}


class Raising(Wrong):
    name = "raising"

    def spoil(self, client, upload):
        return client, {**upload, "x": upload["conv9"]}


class Silent(Half):
    name = "silent"

    def broadcast(self, server, ledger):
        pass


class Impersonal(Half):
    name = "impersonal"

    def personal_model(self, problem, client, payload, data):
        return dict(list(payload.items())[1:])


class Negative(Half):
    name = "negative"

    def weight(self, num_examples):
        return -1.0


class Diverging(Half):
    name = "diverging"

    def aggregate(self, server, ledger, mean_upload, round):
        return super().aggregate(server, ledger, tree.map(lambda d: d * float("nan"), mean_upload), round)


class DivergingParts(Diverging):
    """Every client is addressed."""

    name = "diverging-parts"

    def addressed(self, payload, address, number):
        return payload


class Singular(Half):
    name = "singular"

    def aggregate(self, server, ledger, mean_upload, round):
        raise torch.linalg.LinAlgError("it does not converge")


# --- classes that are no complete methods -----------------------------------------------------------------------------


class Unfinished(fedslr.Algorithm):
    pass


@dataclass(frozen=True)
class Nameless(fedslr.FedAvg):
    pass


@dataclass(frozen=True)
class Slash(Half):
    name: ClassVar[str] = "../up"


@dataclass(frozen=True)
class Taken(Half):
    name: ClassVar[str] = "fedavg"


class Undecorated(Half):
    name = "undecorated"
    beta: Annotated[float, fraction, "nothing"] = 0.5


# --- selections: two right ones and one for each mistake --------------------------------------------------------------


def tensors(rng, size, examples):
    return torch.arange(size)


def floats(rng, size, examples):
    return [float(c) for c in range(size)]


def broken(rng, size, examples):
    return examples[10**6]


def twice(rng, size, examples):
    return torch.tensor([1, 1])


def halves(rng, size, examples):
    return [0.5, 1.5]


def flags(rng, size, examples):
    return [True, False]


def nobody(rng, size, examples):
    return []


def sorting(rng, size, examples):
    """Forgets to return anything, and sorts a list that is nobody else's."""
    examples.sort()


def rows(rng, size, examples):
    return torch.zeros(2, 2).int().numpy()
