"""The words everything else is written in: Params, Batch, Task, Round and the Algorithm protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedslr import schema
from fedslr.matrix import LowRank

Params = dict[str, Tensor]
"""A model, a gradient, a dual: one tensor for every trainable parameter of the model."""

Payload = dict[str, Any]
"""What travels: names to tensors, low-rank factors or again such a dictionary."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of a batch to their mean loss."""


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


class Round(NamedTuple):
    """What a client has to know of the round it trains in."""

    number: int
    """Counted from 0."""
    total: int
    lr: float
    """The local step size η of this round."""
    decay: float
    """What is left of every decaying step size: η over its first value."""
    epochs: int
    """Passes over the data for the global part."""
    personal_epochs: int
    """Passes over the data for a personal part."""


class LocalData(Protocol):
    """One client's training data, as an engine hands it to `local_update`."""

    num_examples: int

    def epochs(self, count: int, phase: int = 0) -> Iterable[Batch]:
        """The batches of `count` freshly shuffled passes; each phase of a method has shuffles of its own."""
        ...

    def pairs(self, count: int, phase: int = 0) -> Iterable[tuple[Batch, Batch]]:
        """The same batches, each with the next one of its epoch; the last with the first."""
        ...

    def first_batch(self, phase: int = 0) -> Batch:
        """The first batch of `epochs`."""
        ...

    def steps(self, count: int) -> int:
        """How many batches `count` passes have."""
        ...


@contextmanager
def _as_tf32() -> Iterator[None]:
    """Let a GPU round single-precision products to TF32."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [b.allow_tf32 for b in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = True
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def gradients(loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    """∂loss/∂wanted: zeros where the loss does not depend on them, be it on none of them, such as an unused head."""
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    return torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)


class Task:
    """The learning problem: a model, a loss, a weight decay. Methods ask it for gradients."""

    tf32 = False
    """Whether a GPU may round the products of the model's gradients. Those of the method, such as low-rank factors, are
    always computed in full."""

    def __init__(self, model: nn.Module, loss: Loss, weight_decay: float) -> None:
        self.model = model
        self.loss_function = loss
        self.weight_decay = weight_decay
        self._slots = self._find_slots()

    copies = False
    """Whether a model is shown copies, since it works in place on what it is shown."""

    def _find_slots(self) -> list[tuple[dict[str, Any], str, str]]:
        """Where the model looks up each trainable parameter; a shared one is looked up in several places."""
        names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        return [
            (module._parameters, key, names[p])
            for module in self.model.modules()
            for key, p in module._parameters.items()
            if p is not None and p in names
        ]

    def params(self) -> Params:
        """The model's own trainable parameters."""
        return {k: p.detach().clone() for k, p in self.model.named_parameters() if p.requires_grad}

    def outputs(self, params: Params, x: Tensor, train: bool = False) -> Tensor:
        if self.model.training != train:
            self.model.train(train)
        # What torch.func.functional_call does, less its search for the slots: 7 % of a small model's step.
        own = [table[key] for table, key, _ in self._slots]
        try:
            for table, key, name in self._slots:
                table[key] = params[name]
            out: Tensor = self.model(x.clone() if self.copies else x)
            return out
        finally:
            for (table, key, _), p in zip(self._slots, own, strict=True):
                table[key] = p

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """f(params; batch), without weight decay."""
        return self.loss_function(self.outputs(params, batch.x, train=True), batch.y)

    def loss_grad(self, params: Params, batch: Batch, frozen: Params | None = None) -> Params:
        """∇f(params; batch), without weight decay. Where `params` are part of the model, `frozen` is the rest."""
        free = {k: v.detach().requires_grad_() for k, v in params.items()}
        with self.products(), torch.enable_grad():
            loss = self.loss({**free, **frozen} if frozen else free, batch)
            grads = gradients(loss, list(free.values()))
        return dict(zip(free, grads, strict=True))

    def products(self) -> AbstractContextManager[None]:
        """The precision in which gradients are computed."""
        return _as_tf32() if self.tf32 else nullcontext()

    def grad(self, params: Params, batch: Batch, frozen: Params | None = None) -> Params:
        """g(params) = ∇f(params; batch) + wd·params."""
        grads = self.loss_grad(params, batch, frozen)
        return {k: g.add(params[k], alpha=self.weight_decay) for k, g in grads.items()}


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
