"""The Algorithm protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from fedslr.core import schema
from fedslr.core.matrix import LowRank
from fedslr.core.problem import Task
from fedslr.core.types import LocalData, Params, Payload, Round

Server = TypeVar("Server", bound=tuple[Any, ...])


Client = TypeVar("Client", bound=tuple[Any, ...])


class Algorithm(ABC, Generic[Server, Client]):
    """A federated method: hyperparameters (a frozen dataclass) and a handful of pure functions.

    No function here touches a file, a device, a random generator or a print; engines run them. States are NamedTuples
    of Params. Uploads are differences `v − w`, never models, and the server sees only their weighted mean.
    """

    name: ClassVar[str]
    """How the method is called: its folder's name, and, for those of the table, its name in recipes."""
    planned: ClassVar[bool] = False
    """Whether a round depends on how many there will be, so that a run cannot be made longer."""
    ledger: ClassVar[tuple[str, ...]] = ()
    """Fields of a client's state that the server mirrors, as a sum or a mean: what was counted there, and only that,
    is booked here."""
    addressing: ClassVar[tuple[str, ...]] = ()
    """Fields of a client's state that `addressed` reads."""

    def __post_init__(self) -> None:
        schema.check(self)

    @abstractmethod
    def init_server(self, w: Params, num_clients: int) -> Server:
        """The server before the first round, from the initial model."""

    @abstractmethod
    def init_client(self, w: Params) -> Client:
        """A client before its first round, from the initial model; `()` when the method keeps nothing."""

    @abstractmethod
    def broadcast(self, server: Server) -> Payload:
        """What every sampled client is sent. Matrices may be low-rank factors; clients receive them multiplied out."""

    def addressed(self, payload: Payload, client: Client) -> Payload:
        """What of the broadcast one client is sent: all of it, unless the method says otherwise."""
        return payload

    @abstractmethod
    def local_update(
        self, task: Task, client: Client, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """One client's work of a round: its new state and its upload, a tree of the shape of the payload."""

    def book(self, client: Client, upload: Payload, share: float) -> Client:
        """The client once its server has counted a share of the upload: only the fields of `ledger` change.

        `local_update` books all of its upload: its new ledger is that of `book(client, upload, 1)`.
        """
        return client

    def weight(self, num_examples: int) -> float:
        """The weight of an upload in the mean: 1, a plain mean, unless the method says otherwise."""
        return 1.0

    @abstractmethod
    def aggregate(self, server: Server, mean_upload: Payload, cohort_size: int) -> Server:
        """The server after the round, from the weighted mean of the uploads and how many there were."""

    def resize(self, server: Server, num_clients: int, leaving: Client | None = None) -> Server:
        """The server of a federation that now has so many clients; one that leaves takes its ledger along."""
        return server

    @abstractmethod
    def global_model(self, server: Server) -> Params | None:
        """The one model everybody could use, dense; None where the method has none."""

    @abstractmethod
    def personal_model(self, task: Task, client: Client, payload: Payload, data: LocalData) -> Params:
        """A client's own model, from its state and the latest broadcast. It may adapt on the client's data."""

    def received_model(self, payload: Payload) -> Params | None:
        """The global model, by one who received the whole broadcast; None where the method has none."""
        return payload

    def shared(self, payload: Payload) -> Payload:
        """The part of a broadcast that is the global model; the rest, such as controls, is no part of its size."""
        return payload

    def deployed(self, client: Client, payload: Payload) -> Payload:
        """The parts a client has to keep to run its personal model; their numbers are the model's size."""
        return self.shared(payload)

    def ranks(self, server: Server) -> dict[str, int]:
        """The rank of every layer of the global model, where the method makes them low; else nothing."""
        return {}


class Phased(Algorithm[Server, Client]):
    """A method whose clients go on to learn for themselves once their upload is made: nobody has to wait for that."""

    @abstractmethod
    def fit(
        self, task: Task, client: Client, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """Phase I: what is learned together; the state as far as it goes, and the upload."""

    @abstractmethod
    def personalize(self, task: Task, client: Client, payload: Payload, data: LocalData, round: Round) -> Client:
        """Phase II: what never leaves the client, from the state that phase I left."""

    def local_update(
        self, task: Task, client: Client, payload: Payload, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        client, upload = self.fit(task, client, payload, data, round)
        return self.personalize(task, client, payload, data, round), upload


def ranks_of(model: Mapping[str, Tensor | LowRank]) -> dict[str, int]:
    """The rank of every layer given as factors."""
    return {k: x.rank for k, x in model.items() if isinstance(x, LowRank)}
