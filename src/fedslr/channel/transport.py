"""Messages inside a simulation; their sizes are those of real messages, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fedslr.channel import encoding, layout, measuring, packing
from fedslr.core import factored
from fedslr.core.tree import Tree, leaves
from fedslr.core.types import Payload


class Measured:
    """Messages are not encoded; their sizes follow from how many of their numbers are zero."""

    def send(self, payload: Payload) -> tuple[layout.Size, Payload]:
        """Return the size of a message, and the tree that the receiver decodes."""
        if not payload:
            return encoding.NOTHING.size, {}
        sent = factored.smaller_forms(payload)
        received = factored.multiply_out(sent, check=False)
        # A sum meets every NaN and infinity; one that overflows costs a second look.
        sums = [x.sum() for x in leaves(received) if _is_real(x)]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            factored.require_finite(payload)
            factored.require_finite(received)
        return measuring.measure(sent), received


def survey(uploads: Payload, states: Tree, clients: int) -> Callable[[], tuple[list[layout.Size], Collection[int]]]:
    """Return a function that reads the size of every upload, and the clients that may have NaN or infinity."""
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
    """Return the places of the flags that are not set."""
    return [i for i, there in enumerate(flags.tolist()) if not there]


class Encoded(Measured):
    """Messages are encoded and decoded, as in a deployment."""

    def send(self, payload: Payload) -> tuple[layout.Size, Payload]:
        if not payload:
            return encoding.NOTHING.size, {}
        message = encoding.encode(payload)
        return message.size, factored.multiply_out(encoding.decode(message.data, max_numbers=packing.NO_LIMIT))
