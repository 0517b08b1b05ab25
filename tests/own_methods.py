"""Methods and selections of a person's own, a few right and the others each with a mistake."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import torch

import fedslr


@dataclass(frozen=True)
class Half(fedslr.FedAvg):
    name: ClassVar[str] = "half"
    share: Annotated[float, fedslr.schema.fraction, "of the way that the server goes"] = 0.5

    def aggregate(self, server, mean_upload, cohort_size):
        return super().aggregate(server, fedslr.tree.map(lambda d: self.share * d, mean_upload), cohort_size)


class Other(Half):
    pass


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
    beta: Annotated[float, fedslr.schema.fraction, "nothing"] = 0.5


@dataclass(frozen=True)
class Listed(Half):
    name: ClassVar[str] = "listed"
    layers: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Needy(Half):
    name: ClassVar[str] = "needy"
    share: Annotated[float, fedslr.schema.fraction, "without a default"] = field(kw_only=True)


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


class Shapes(Wrong):
    def spoil(self, client, upload, payload):
        return client, {k: x.sum(0) for k, x in upload.items()}


class Doubles(Wrong):
    def spoil(self, client, upload, payload):
        return client, {k: x.double() for k, x in upload.items()}


class InPlace(Wrong):
    def spoil(self, client, upload, payload):
        for k, x in upload.items():
            payload[k] += 0.1 * x
        return client, upload


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


def twice(rng, size, examples):
    return torch.tensor([1, 1])


def halves(rng, size, examples):
    return [0.5, 1.0]


def flags(rng, size, examples):
    return [True, False]


def sorting(rng, size, examples):
    examples.sort()


def rows(rng, size, examples):
    return torch.zeros(2, 2).int().numpy()
