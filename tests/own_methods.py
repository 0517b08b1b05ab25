"""Methods and selections of a person's own, a few right and the others each with a mistake."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch

import fedslr


@dataclass(frozen=True)
class Half(fedslr.FedAvg):
    name: ClassVar[str] = "half"
    share: Annotated[float, fedslr.core.schema.fraction, "of the way that the server goes"] = 0.5

    def aggregate(self, server, mean_upload, cohort_size):
        return super().aggregate(server, fedslr.core.tree.map(lambda d: self.share * d, mean_upload), cohort_size)


class Other(Half):
    pass


def doubled(scores, labels):
    """A loss."""
    return 2 * torch.nn.functional.cross_entropy(scores, labels)


NOT_A_LOSS = 3


class Unfinished(fedslr.Algorithm):
    pass


class Nameless(fedslr.FedAvg):
    pass


class Slash(Half):
    name = "../up"


@dataclass(frozen=True)
class Field(fedslr.FedAvg):
    name: str = "field"


class Undecorated(Half):
    name = "undecorated"
    beta: Annotated[float, fedslr.core.schema.fraction, "nothing"] = 0.5


@dataclass(frozen=True)
class Listed(Half):
    name: ClassVar[str] = "listed"
    layers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Needy(Half):
    name: ClassVar[str] = "needy"
    share: Annotated[float, fedslr.core.schema.fraction, "without a default"] = field(kw_only=True)


@dataclass(frozen=True)
class Picky(Half):
    name: ClassVar[str] = "picky"

    def __post_init__(self):
        raise RuntimeError("not today")


def hidden():
    @dataclass(frozen=True)
    class Inner(fedslr.FedAvg):
        name: ClassVar[str] = "inner"

    return Inner


Made = hidden()


class Wrong(Half):
    """Whose local_update is one of the mistakes below."""

    name = "wrong"

    def local_update(self, task, client, payload, data, round):
        client, upload = super().local_update(task, client, payload, data, round)
        return self.spoil(client, upload, payload)


class NoPair(Wrong):
    def spoil(self, client, upload, payload):
        return upload


class Nothing(Wrong):
    def spoil(self, client, upload, payload):
        return None


class Keys(Wrong):
    def spoil(self, client, upload, payload):
        return client, dict(list(upload.items())[1:])


def scaled(aggregate):
    """Gives a function one argument more."""

    @functools.wraps(aggregate)
    def call(self, server, mean_upload, cohort_size):
        return aggregate(self, server, mean_upload, cohort_size, 0.5)

    return call


class Seen(NamedTuple):
    w: dict
    cohorts: torch.Tensor


class Unusual(Half):
    """All of it as it may be: numbers of other kinds, a decorated function, a server that remembers more and more."""

    name = "unusual"

    def init_server(self, w, num_clients):
        return Seen(w, torch.zeros(0))

    def weight(self, num_examples):
        return np.int64(num_examples)

    @scaled
    def aggregate(self, server, mean_upload, cohort_size, scale):
        w = fedslr.core.tree.map(lambda w, d: w + scale * d, server.w, mean_upload)
        return Seen(w, torch.cat([server.cohorts, torch.tensor([float(cohort_size)])]))

    def resize(self, server, num_clients):
        return server

    def global_model(self, server):
        return MappingProxyType(server.w)


class Swapped(Wrong):
    def spoil(self, client, upload, payload):
        return upload, client


class Roundless(Half):
    name = "roundless"

    def local_update(self, task, client, payload, data):
        return client, payload


class NoServer(Half):
    name = "no-server"

    def aggregate(self, server, mean_upload, cohort_size):
        pass


class Bent(Half):
    name = "bent"

    def aggregate(self, server, mean_upload, cohort_size):
        return server._replace(w={k: x[:1] for k, x in server.w.items()})


class Silent(Half):
    name = "silent"

    def broadcast(self, server):
        pass


class Sends(Half):
    name = "sends"

    def broadcast(self, server):
        return server


class Partly(Half):
    name = "partly"

    def global_model(self, server):
        return dict(list(server.w.items())[1:])


class Impersonal(Half):
    name = "impersonal"

    def personal_model(self, task, client, payload, data):
        pass


class Weighty(Half):
    name = "weighty"

    def weight(self, num_examples):
        pass


class Kept(NamedTuple):
    n: dict


class Swells(Half):
    name = "swells"

    def init_client(self, w):
        return Kept({"conv1.weight": torch.zeros_like(w["conv1.weight"]), "seen": torch.zeros(0)})

    def local_update(self, task, client, payload, data, round):
        _, upload = super().local_update(task, client, payload, data, round)
        return Kept({"conv1.weight": client.n["conv1.weight"][:1], "seen": torch.zeros(1)}), upload


class Shapes(Wrong):
    def spoil(self, client, upload, payload):
        return client, {k: x.sum(0) for k, x in upload.items()}


class Doubles(Wrong):
    def spoil(self, client, upload, payload):
        return client, {k: x.double() for k, x in upload.items()}


class Whole(Half):
    """FedAvg."""

    name = "whole"

    def aggregate(self, server, mean_upload, cohort_size):
        return fedslr.FedAvg.aggregate(self, server, mean_upload, cohort_size)


class InPlace(Whole):
    name = "in-place"

    def local_update(self, task, client, payload, data, round):
        before = {k: x.clone() for k, x in payload.items()}
        for batch in data.epochs(round.epochs):
            for k, g in task.grad(payload, batch).items():
                payload[k] -= round.lr * g
        return (), fedslr.core.tree.sub(payload, before)


class Replacing(Whole):
    name = "replacing"

    def local_update(self, task, client, payload, data, round):
        before = dict(payload)
        for batch in data.epochs(round.epochs):
            for k, g in task.grad(payload, batch).items():
                payload[k] = payload[k] - round.lr * g
        return (), fedslr.core.tree.sub(payload, before)


class Data(Whole):
    name = "data"

    def local_update(self, task, client, payload, data, round):
        before = {k: x.clone() for k, x in payload.items()}
        for batch in data.epochs(round.epochs):
            for k, g in task.grad(payload, batch).items():
                payload[k].data.sub_(round.lr * g)
        return (), fedslr.core.tree.sub(payload, before)


class Moving(NamedTuple):
    velocity: dict


class Momentum(Whole):
    """What a client keeps begins as the initial model and is changed in place; nothing comes of it."""

    name = "momentum"

    def init_client(self, w):
        return Moving(w)

    def local_update(self, task, client, payload, data, round):
        for x in client.velocity.values():
            x *= 0.5
        return client, super().local_update(task, (), payload, data, round)[1]


class Summing(Whole):
    name = "summing"

    def aggregate(self, server, mean_upload, cohort_size):
        for k, x in mean_upload.items():
            server.w[k] += x
        return server


class Noisy(Whole):
    """Its server adds noise."""

    name = "noisy"

    def aggregate(self, server, mean_upload, cohort_size):
        made = super().aggregate(server, mean_upload, cohort_size)
        return type(made)({k: x + 0.3 * torch.randn_like(x) for k, x in made.w.items()})


class Log(NamedTuple):
    w: dict
    log: list


class Logging(Whole):
    name = "logging"

    def init_server(self, w, num_clients):
        return Log(w, [])


class Addressing(Whole):
    """Sends no biases, which clients then train from nothing; the upload has all of the broadcast."""

    name = "addressing"

    def addressed(self, payload, client):
        return {k: x for k, x in payload.items() if not k.endswith("bias")}

    def local_update(self, task, client, payload, data, round):
        biases = {k: torch.zeros_like(x) for k, x in task.params().items() if k not in payload}
        return super().local_update(task, client, {**payload, **biases}, data, round)


class Partial(Whole):
    name = "partial"

    def _update(self, task, client, payload, data, round, scale):
        client, upload = fedslr.FedAvg.local_update(self, task, client, payload, data, round)
        return client, {k: scale * x for k, x in upload.items()}

    local_update = functools.partialmethod(_update, scale=1.0)


class Rich(fedslr.FedSLR):
    """The state of FedSLR."""

    name = "rich"


@dataclass(frozen=True)
class Maybe(Half):
    name: ClassVar[str] = "maybe"
    k: Annotated[int | None, fedslr.core.schema.countable, "nothing"] = None
    rate: Annotated[float, fedslr.core.schema.fraction, "nothing"] | None = None


@dataclass(frozen=True)
class Fixed(Half):
    name: ClassVar[str] = "fixed"
    share: Annotated[float, fedslr.core.schema.fraction, "not to be set"] = field(default=0.5, init=False)


@dataclass(frozen=True)
class Typo(Half):
    name: ClassVar[str] = "typo"
    beta: Annotated[float, fedslr.core.schema.positiv, "misspelt"] = 0.5


class NewState(Wrong):
    def spoil(self, client, upload, payload):
        return {"seen": upload}, upload


class Raises(Wrong):
    def spoil(self, client, upload, payload):
        return client, {**upload, "x": payload["conv9"]}


class Forgetful(Half):
    name = "forgetful"

    def init_client(self, w):
        return {"m": w}


class Counting(Half):
    name = "counting"

    def init_client(self, w):
        return Count(0)


class Count(NamedTuple):
    n: int


class Grows(Half):
    name = "grows"

    def init_client(self, w):
        return Count(torch.zeros(()))

    def local_update(self, task, client, payload, data, round):
        return Count(1.0), super().local_update(task, (), payload, data, round)[1]


class Negative(Half):
    name = "negative"

    def weight(self, num_examples):
        return -1.0


class Diverging(Half):
    name = "diverging"

    def aggregate(self, server, mean_upload, cohort_size):
        return super().aggregate(server, fedslr.core.tree.map(lambda d: d * float("nan"), mean_upload), cohort_size)


class Singular(Half):
    name = "singular"

    def aggregate(self, server, mean_upload, cohort_size):
        raise torch.linalg.LinAlgError("it does not converge")


class Weightless(Half):
    name = "weightless"

    def weight(self, num_examples):
        return 0.0


class Aggregates(Half):
    name = "aggregates"

    def aggregate(self, server, mean_upload, cohort_size):
        return server.nothing


@dataclass(frozen=True)
class Abstract(fedslr.Algorithm):
    pass


def first(rng, size, examples):
    return range(size)


def broken(rng, size, examples):
    return examples[10**6]


def tensors(rng, size, examples):
    return torch.arange(size)


def floats(rng, size, examples):
    return [float(c) for c in range(size)]


def twice(rng, size, examples):
    return torch.tensor([1, 1])


def halves(rng, size, examples):
    return [0.5, 1.5]


def flags(rng, size, examples):
    return [True, False]


def sorting(rng, size, examples):
    """Forgets to return anything, and sorts a list that is nobody else's."""
    examples.sort()


def rows(rng, size, examples):
    return torch.zeros(2, 2).int().numpy()
