"""How messages travel inside a simulation: their sizes are those of real messages, to the byte."""

from __future__ import annotations

from collections.abc import Collection

import torch

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
        received = wire.unfold(payload, check=False)
        # A sum meets every NaN and infinity; one that overflows costs a second look.
        sums = [x.sum() for x in leaves(received) if x.is_floating_point()]
        if sums and not bool(torch.isfinite(torch.stack(sums)).all()):
            wire.require_finite(payload)
            wire.require_finite(received)
        return wire.measure(payload), received

    def survey(self, made: Together) -> tuple[list[wire.Size], Collection[int]]:
        """The size of every client's upload, and the clients whose numbers have to be looked at."""
        clients, trees = made.clients, [made.uploads, plain(made.states)]
        sums = [x.flatten(1).sum(1) for t in trees for x in leaves(t) if x.is_floating_point()]
        device = leaves(trees[0])[0].device if made.uploads else "cpu"
        whole = torch.stack([torch.isfinite(s) for s in sums]).all(0) if sums else torch.ones(clients, dtype=torch.bool)
        if not made.uploads:
            return [wire.NOTHING.size] * clients, [i for i, ok in enumerate(whole.tolist()) if not ok]
        counts = wire.nonzeros(made.uploads, stacked=True)
        found = torch.cat([counts, whole.to(device, torch.int64)[:, None]], 1).cpu()
        return wire.sizes(made.uploads, found[:, :-1]), [i for i, ok in enumerate(found[:, -1].tolist()) if not ok]


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
