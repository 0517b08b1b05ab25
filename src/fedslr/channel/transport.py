"""How messages travel inside a simulation: their sizes are those of real messages, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fedslr.channel import encoding, layout, measuring
from fedslr.core import factored
from fedslr.core.tree import Tree, leaves
from fedslr.core.types import Params, Payload


class Measured:
    """Messages stay where they are; what is read back is how many of their numbers are zero."""

    def send(self, payload: Payload) -> tuple[layout.Size, Payload]:
        """A message's size, and what the other side makes of it."""
        if not payload:
            return encoding.NOTHING.size, {}
        travels = factored.settled(payload)
        received = factored.unfold(travels, check=False)
        # A sum meets every NaN and infinity; one that overflows costs a second look.
        sums = [x.sum() for x in leaves(received) if _is_real(x)]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            factored.require_finite(payload)
            factored.require_finite(received)
        return measuring.measure(travels), received

    def survey(
        self, uploads: Payload, states: Tree, clients: int
    ) -> Callable[[], tuple[list[layout.Size], Collection[int]]]:
        """The size of every client's upload, and the clients whose numbers have to be looked at; to be read later."""
        # Few launches: those beyond a thousand wait until the GPU has worked off what was launched before them.
        sums = [_sum_by_client(x) for tree in (uploads, states) for x in leaves(tree) if _is_real(x)]
        whole = torch.isfinite(torch.stack(sums)).all(0) if sums else torch.ones(clients).bool()
        if not any(isinstance(x, Tensor) for x in leaves(uploads)):
            size = encoding.encode(uploads).size if uploads else encoding.NOTHING.size
            return lambda: ([size] * clients, _missing(whole))
        counts = measuring.nonzeros(uploads, stacked=True)
        found = torch.cat([counts, whole.to(counts.device, torch.int64)[:, None]], 1)

        def read() -> tuple[list[layout.Size], Collection[int]]:
            here = found.cpu()
            return measuring.sizes(uploads, here[:, :-1]), _missing(here[:, -1])

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

    def send(self, payload: Payload) -> tuple[layout.Size, Payload]:
        if not payload:
            return encoding.NOTHING.size, {}
        message = encoding.encode(payload)
        return message.size, factored.unfold(encoding.decode(message.data, max_numbers=self.limit))
