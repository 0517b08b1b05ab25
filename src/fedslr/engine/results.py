"""The results of engines: the work of one client, or of a whole cohort as stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.channel.layout import Size
from fedslr.channel.transport import Measured
from fedslr.core import factored, tree
from fedslr.core.errors import WireError
from fedslr.core.states import plain
from fedslr.core.types import Params, Payload, Round
from fedslr.engine.workload import Member

T = TypeVar("T")

Book = Callable[[Any, Payload, Tensor, Round], Any]
Reading = Callable[[], list[Size]]
"""Returns the size of every upload, or raises `Diverged`; it may wait for a GPU."""


class Diverged(Exception):
    """The training of one client gave values that are not finite."""

    def __init__(self, slot: int, why: WireError) -> None:
        super().__init__(str(why))
        self.slot = slot
        """The place of the client among those of the result."""


class Result(Protocol):
    """The work of some clients of a cohort."""

    @property
    def size(self) -> int:
        """The number of clients."""
        ...

    def weighted_sum(self, factors: Sequence[float]) -> Payload:
        """Return Σ factor·upload."""
        ...

    def upload(self, slot: int) -> Payload:
        """Return the upload of one client."""
        ...

    def survey(self, transport: Measured) -> Reading:
        """Begin to measure all uploads and to look for values that are not finite."""
        ...

    def booked(self, book: Book, shares: Sequence[float], round: Round) -> list[Member]:
        """Return every client after its ledger was booked."""
        ...


class ClientResult(NamedTuple):
    """The work of one client."""

    member: Member
    """The client after training, with the ledger from before."""
    sent: Payload
    size: int = 1

    def weighted_sum(self, factors: Sequence[float]) -> Payload:
        return tree.map(lambda x: x * factors[0], self.sent)

    def upload(self, slot: int) -> Payload:
        return self.sent

    def survey(self, transport: Measured) -> Reading:
        try:
            size, _ = transport.send(self.sent)
            factored.require_finite({"state": plain(self.member.client)})
        except WireError as error:
            raise Diverged(0, error) from error
        return lambda: [size]

    def booked(self, book: Book, shares: Sequence[float], round: Round) -> list[Member]:
        share = torch.tensor(shares[0], dtype=torch.float64)
        return [self.member._replace(ledger=book(self.member.ledger, self.sent, share, round))]


class CohortResult(NamedTuple):
    """The work of a whole cohort: every tensor has a leading axis of clients."""

    clients: Any
    ledgers: Any
    """The ledgers from before the round."""
    addresses: Payload
    uploads: Payload
    size: int

    def first(self, size: int) -> CohortResult:
        """Return the result of the first clients, without those that only filled up the cohort."""
        if size == self.size:
            return self
        clients, ledgers, addresses, uploads = pytree.tree_map(lambda x: x[:size], tuple(self[:4]))
        return CohortResult(clients, ledgers, addresses, uploads, size)

    def weighted_sum(self, factors: Sequence[float]) -> Payload:
        if len(set(factors)) == 1:
            return tree.map(lambda x: x.sum(0) * factors[0], self.uploads)

        def weighted(x: Tensor) -> Tensor:
            scale = _without_waiting(factors, x.device).to(x.dtype)
            return (x * scale.view(-1, *[1] * (x.ndim - 1))).sum(0)

        return tree.map(weighted, self.uploads)

    def upload(self, slot: int) -> Payload:
        """Return a copy: the next round of an engine may overwrite the stacked uploads."""
        return tree.map(lambda x: x[slot].clone(), self.uploads)

    def survey(self, transport: Measured) -> Reading:
        read = transport.survey(self.uploads, plain(self.clients), self.size)

        def sizes() -> list[Size]:
            found, suspects = read()
            for slot in suspects:
                own = pytree.tree_map(lambda x, slot=slot: x[slot], (plain(self.clients), self.uploads))
                try:
                    factored.require_finite({**own[1], "state": own[0]})
                except WireError as error:
                    raise Diverged(slot, error) from error
            return found

        return sizes

    def booked(self, book: Book, shares: Sequence[float], round: Round) -> list[Member]:
        ledgers = self.ledgers
        if pytree.tree_leaves(ledgers):
            each = _without_waiting(shares, pytree.tree_leaves(ledgers)[0].device)
            ledgers = torch.vmap(lambda c, u, s: book(c, u, s, round))(ledgers, self.uploads, each)
        return [Member(*parts) for parts in _unstack((self.clients, ledgers, self.addresses), self.size)]


class Engine(Protocol):
    """An engine, as the loop of a run uses it."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `expect` prepares the next round."""
        ...

    def train(
        self, cohort: Sequence[int], members: Sequence[Member], payloads: Sequence[Payload], round: Round
    ) -> Iterable[Result]:
        """Train a cohort; give results as clients finish. `members` and `payloads` are in the order of `cohort`."""
        ...

    def expect(self, cohort: Sequence[int], members: Sequence[Member], round: Round) -> None:
        """Prepare the next call of `train`, which will be for these very members."""
        ...

    def meanwhile(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin the server's work on uploads if it can run beside clients; return a function that gives its result."""
        ...

    def personal_model(self, number: int, member: Member, payload: Payload) -> Params:
        """Return the personal model of one client."""
        ...

    def personal_accuracy(
        self, cohort: Sequence[int], members: Sequence[Member], payloads: Sequence[Payload]
    ) -> list[float | None]:
        """Return each client's test accuracy under its personal model; None for a client without test data."""
        ...

    def accuracy(self, params: Params, cohort: Sequence[int]) -> list[float | None]:
        """Return each client's test accuracy under one model; None for a client without test data."""
        ...

    def seeded(self, number: int, round: int) -> AbstractContextManager[None]:
        """Seed dropout and the like by round and client, so that a resumed run repeats them."""
        ...


def _without_waiting(values: Sequence[float], device: torch.device) -> Tensor:
    """Return a vector in double precision; a GPU is not waited for, as it would be by a copy from ordinary memory."""
    vector = torch.tensor(values, dtype=torch.float64)
    return vector.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else vector


def _unstack(stacked: Any, size: int) -> list[Any]:
    """Return one tree per client, each in memory of its own."""
    leaves, form = pytree.tree_flatten(stacked)
    slices = [x.unbind(0) for x in leaves]
    copies = [[torch.empty_like(part) for part in parts] for parts in slices]
    if leaves:
        torch._foreach_copy_([c for parts in copies for c in parts], [p for parts in slices for p in parts])
    return [pytree.tree_unflatten([parts[i] for parts in copies], form) for i in range(size)]
