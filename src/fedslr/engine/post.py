"""How messages travel inside a simulation: their sizes are those of real messages, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fedslr import wire
from fedslr.engine.batched import Together
from fedslr.store import plain
from fedslr.tree import leaves
from fedslr.types import Params, Payload


class Measured:
    """Messages stay where they are; what is read back is how many of their numbers are zero."""

    def send(self, payload: Payload) -> tuple[wire.Size, Payload]:
        """A message's size, and what the other side makes of it."""
        if not payload:
            return wire.NOTHING.size, {}
        travels = wire.settled(payload)
        received = wire.unfold(travels, check=False)
        # A sum meets every NaN and infinity; one that overflows costs a second look.
        sums = [x.sum() for x in leaves(received) if _is_real(x)]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            wire.require_finite(payload)
            wire.require_finite(received)
        return wire.measure(travels), received

    def survey(self, made: Together) -> Callable[[], tuple[list[wire.Size], Collection[int]]]:
        """The size of every client's upload, and the clients whose numbers have to be looked at; to be read later."""
        trees = [made.uploads, plain(made.states)]
        # Few launches: those beyond a thousand wait until the GPU has worked off what was launched before them.
        sums = [_sum_by_client(x) for t in trees for x in leaves(t) if _is_real(x)]
        whole = torch.isfinite(torch.stack(sums)).all(0) if sums else torch.ones(made.clients).bool()
        if not any(isinstance(x, Tensor) for x in leaves(made.uploads)):
            size = wire.encode(made.uploads).size if made.uploads else wire.NOTHING.size
            return lambda: ([size] * made.clients, _missing(whole))
        counts = wire.nonzeros(made.uploads, stacked=True)
        found = torch.cat([counts, whole.to(counts.device, torch.int64)[:, None]], 1)

        def read() -> tuple[list[wire.Size], Collection[int]]:
            here = found.cpu()
            return wire.sizes(made.uploads, here[:, :-1]), _missing(here[:, -1])

        return read


def _sum_by_client(x: Tensor) -> Tensor:
    # Whatever the strides, nothing is copied; with a last axis of 1 there is one to sum over for a scalar, too.
    return x.unsqueeze(-1).sum(tuple(range(1, x.ndim + 1)))


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _missing(flags: Tensor) -> list[int]:
    """Where a flag is not set."""
    return [i for i, there in enumerate(flags.tolist()) if not there]


class Encoded(Measured):
    """Broadcasts, and uploads of clients that train alone, are really encoded and decoded again.

    Uploads of a cohort that trains together are measured: encoding them loses nothing.
    """

    def __init__(self, model: Params) -> None:
        # The model's size limits what a message may unfold to.
        self.limit = 4 * sum(max(x.numel(), 1) for x in model.values())

    def send(self, payload: Payload) -> tuple[wire.Size, Payload]:
        if not payload:
            return wire.NOTHING.size, {}
        message = wire.encode(payload)
        return message.size, wire.unfold(wire.decode(message.data, max_numbers=self.limit))
