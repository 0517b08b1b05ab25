"""The results of engines: the work of one client, or of a whole cohort as stacked tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.channel.layout import Size
from fedslr.channel.transport import Measured, measure_uploads
from fedslr.core import factored, tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import WireError
from fedslr.core.states import plain
from fedslr.core.types import Payload, Round
from fedslr.engine.aggregation import book
from fedslr.engine.workload import Member

PendingSizes = Callable[[], list[Size]]
"""A function that returns the size of every upload, or raises `Diverged`; it may wait for a GPU."""


class Diverged(Exception):
    """A client's training gave values that are not finite."""

    def __init__(self, number: int, why: WireError) -> None:
        super().__init__(str(why))
        self.number = number
        """The client."""


class ClientResult(NamedTuple):
    """The work of one client."""

    numbers: Sequence[int]
    """The client, as the only one of this result."""
    member: Member
    """The client after training, with the ledger from before."""
    upload: Payload

    def weighted_sum(self, factors: Sequence[float]) -> Payload:
        """Return Σ factor·upload."""
        return tree.map(lambda x: x * factors[0], self.upload)

    def upload_of(self, slot: int) -> Payload:
        """Return the upload of the client at a place of `numbers`."""
        return self.upload

    def measure(self) -> PendingSizes:
        """Begin to measure all uploads and to look for values that are not finite."""
        try:
            size, _ = Measured().send(self.upload)
            factored.require_finite({"state": plain(self.member.client)})
        except WireError as error:
            raise Diverged(self.numbers[0], error) from error
        return lambda: [size]

    def booked(self, algorithm: Algorithm[Any, Any, Any], shares: Sequence[float], round: Round) -> list[Member]:
        """Return every client after the counted share of its upload was booked in its ledger."""
        share = torch.tensor(shares[0], dtype=torch.float64)
        return [self.member._replace(ledger=book(algorithm, self.member.ledger, self.upload, share, round))]


class CohortResult(NamedTuple):
    """The work of a whole cohort, as a `ClientResult` whose tensors have a leading axis of clients."""

    numbers: Sequence[int]
    clients: Any
    ledgers: Any
    """The ledgers from before the round."""
    addresses: Payload
    uploads: Payload

    def without_padding(self, numbers: Sequence[int]) -> CohortResult:
        """Return the result of the first clients, which have these numbers, without the copies that pad the cohort."""
        if len(numbers) == len(self.numbers):
            return self._replace(numbers=numbers)
        return CohortResult(numbers, *pytree.tree_map(lambda x: x[: len(numbers)], tuple(self[1:])))

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

    def measure(self) -> PendingSizes:
        read = measure_uploads(self.uploads, plain(self.clients), len(self.numbers))

        def sizes() -> list[Size]:
            found, suspects = read()
            for slot in suspects:
                client, upload = pytree.tree_map(lambda x, slot=slot: x[slot], (plain(self.clients), self.uploads))
                try:
                    factored.require_finite({**upload, "state": client})
                except WireError as error:
                    raise Diverged(self.numbers[slot], error) from error
            return found

        return sizes

    def booked(self, algorithm: Algorithm[Any, Any, Any], shares: Sequence[float], round: Round) -> list[Member]:
        ledgers = self.ledgers
        if pytree.tree_leaves(ledgers):
            each = _without_waiting(shares, pytree.tree_leaves(ledgers)[0].device)
            ledgers = torch.vmap(lambda c, u, s: book(algorithm, c, u, s, round))(ledgers, self.uploads, each)
        return [Member(*parts) for parts in _unstack((self.clients, ledgers, self.addresses), len(self.numbers))]


Result = ClientResult | CohortResult


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
