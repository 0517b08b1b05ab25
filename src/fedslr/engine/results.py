"""The results of engines: the work of one client, or of a whole cohort as stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.channel.layout import Size
from fedslr.channel.transport import Measured, survey
from fedslr.core import factored, tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import WireError
from fedslr.core.states import plain
from fedslr.core.types import Params, Payload, Round
from fedslr.engine.aggregation import book
from fedslr.engine.workload import Member, Participant

T = TypeVar("T")

Reading = Callable[[], list[Size]]
"""A function that returns the size of every upload, or raises `Diverged`; it may wait for a GPU."""


class Diverged(Exception):
    """A client's training gave values that are not finite."""

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

    def upload_of(self, slot: int) -> Payload:
        """Return the upload of one client."""
        ...

    def survey(self) -> Reading:
        """Begin to measure all uploads and to look for values that are not finite."""
        ...

    def booked(self, algorithm: Algorithm[Any, Any, Any], shares: Sequence[float], round: Round) -> list[Member]:
        """Return every client after the counted share of its upload was booked in its ledger."""
        ...


class ClientResult(NamedTuple):
    """The work of one client."""

    member: Member
    """The client after training, with the ledger from before."""
    upload: Payload
    size: int = 1

    def weighted_sum(self, factors: Sequence[float]) -> Payload:
        return tree.map(lambda x: x * factors[0], self.upload)

    def upload_of(self, slot: int) -> Payload:
        return self.upload

    def survey(self) -> Reading:
        try:
            size, _ = Measured().send(self.upload)
            factored.require_finite({"state": plain(self.member.client)})
        except WireError as error:
            raise Diverged(0, error) from error
        return lambda: [size]

    def booked(self, algorithm: Algorithm[Any, Any, Any], shares: Sequence[float], round: Round) -> list[Member]:
        share = torch.tensor(shares[0], dtype=torch.float64)
        return [self.member._replace(ledger=book(algorithm, self.member.ledger, self.upload, share, round))]


class CohortResult(NamedTuple):
    """The work of a whole cohort: every tensor has a leading axis of clients."""

    clients: Any
    ledgers: Any
    """The ledgers from before the round."""
    addresses: Payload
    uploads: Payload
    size: int

    def first(self, size: int) -> CohortResult:
        """Return the result of the first clients, without the copies that pad the cohort."""
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

    def upload_of(self, slot: int) -> Payload:
        """Return a copy: the next round of an engine may overwrite the stacked uploads."""
        return tree.map(lambda x: x[slot].clone(), self.uploads)

    def survey(self) -> Reading:
        read = survey(self.uploads, plain(self.clients), self.size)

        def sizes() -> list[Size]:
            found, suspects = read()
            for slot in suspects:
                client, upload = pytree.tree_map(lambda x, slot=slot: x[slot], (plain(self.clients), self.uploads))
                try:
                    factored.require_finite({**upload, "state": client})
                except WireError as error:
                    raise Diverged(slot, error) from error
            return found

        return sizes

    def booked(self, algorithm: Algorithm[Any, Any, Any], shares: Sequence[float], round: Round) -> list[Member]:
        ledgers = self.ledgers
        if pytree.tree_leaves(ledgers):
            each = _without_waiting(shares, pytree.tree_leaves(ledgers)[0].device)
            ledgers = torch.vmap(lambda c, u, s: book(algorithm, c, u, s, round))(ledgers, self.uploads, each)
        return [Member(*parts) for parts in _unstack((self.clients, ledgers, self.addresses), self.size)]


class Engine(Protocol):
    """An engine, as the loop of a run uses it. A cohort may be iterated over more than once."""

    def train(self, cohort: Iterable[Participant], round: Round) -> Iterable[Result]:
        """Train a cohort; yield results as clients finish, in the order of the cohort."""
        ...

    def expect(self, numbers: Sequence[int], member_of: Callable[[int], Member], round: Round) -> Mapping[int, Member]:
        """Prepare the next round of training; return the members that were read for it, which must train in it."""
        ...

    def meanwhile(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin the server's work on uploads if it can run beside clients; return a function that gives its result."""
        ...

    def personal_model(self, number: int, member: Member, payload: Payload) -> Params:
        """Return the personal model of one client."""
        ...

    def personal_accuracy(self, cohort: Iterable[Participant]) -> list[float | None]:
        """Return each client's test accuracy under its personal model; None for a client without test data."""
        ...

    def accuracy(self, params: Params, numbers: Sequence[int]) -> list[float | None]:
        """Return each client's test accuracy under one model; None for a client without test data."""
        ...

    def seeded(self, number: int, round: int) -> AbstractContextManager[None]:
        """Seed dropout and the like by round and client, so that a resumed run repeats them."""
        ...


def _without_waiting(values: Sequence[float], device: torch.device) -> Tensor:
    """Return a float64 vector on a device. A copy from pinned memory does not wait for the GPU."""
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
