"""Messages inside a simulation. Their sizes equal those of real messages, to the byte."""

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
    """A transport that does not encode messages. It computes their sizes from how many of their values are zero."""

    def send(self, payload: Payload) -> tuple[layout.Size, Payload]:
        """Return the size of a message and the tree that the receiver decodes."""
        if not payload:
            return encoding.NOTHING.size, {}
        sent = factored.smaller_forms(payload)
        received = factored.multiply_out(sent, check=False)
        # NaN and infinity make a sum not finite. A sum that merely overflowed is checked again, element by element.
        sums = [x.sum() for x in leaves(received) if _is_real(x)]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            factored.require_finite(payload)
            factored.require_finite(received)
        return measuring.measure(sent), received


def measure_uploads(
    uploads: Payload, states: Tree, clients: int
) -> Callable[[], tuple[list[layout.Size], Collection[int]]]:
    """Return a function that reads the size of every upload, and the clients that have NaN or infinity."""
    # Launch few kernels: beyond about a thousand pending ones, launching waits for the GPU.
    sums = [_sum_by_client(x) for tree in (uploads, states) for x in leaves(tree) if _is_real(x)]
    whole = torch.isfinite(torch.stack(sums)).all(0) if sums else torch.ones(clients).bool()
    if not any(isinstance(x, Tensor) for x in leaves(uploads)):
        size = encoding.encode(uploads).size if uploads else encoding.NOTHING.size
        return lambda: ([size] * clients, _missing(whole))
    counts = measuring.nonzeros(uploads)
    found = torch.cat([counts, whole.to(counts.device, torch.int64)[:, None]], 1)

    def read() -> tuple[list[layout.Size], Collection[int]]:
        here = found.cpu()
        return measuring.sizes(uploads, here[:, :-1]), _missing(here[:, -1])

    return read


def _sum_by_client(x: Tensor) -> Tensor:
    # Nothing is copied. The added last axis of size 1 lets one scalar per client be summed, too.
    return x.unsqueeze(-1).sum(tuple(range(1, x.ndim + 1)))


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _missing(flags: Tensor) -> list[int]:
    """Return the indices of the flags that are not set."""
    return [i for i, there in enumerate(flags.tolist()) if not there]


class Encoded(Measured):
    """A transport that encodes a broadcast and decodes it again, as a deployment does."""

    def send(self, payload: Payload) -> tuple[layout.Size, Payload]:
        if not payload:
            return encoding.NOTHING.size, {}
        message = encoding.encode(payload)
        return message.size, factored.multiply_out(encoding.decode(message.data, max_numbers=packing.NO_LIMIT))
