"""Losses by name: built-in ones and users' own."""

from __future__ import annotations

from torch.nn.functional import cross_entropy

from fedslr.core import plugins
from fedslr.core.types import Loss

LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy}


def find(name: str) -> Loss:
    """Return the loss of a name: one of the table, or a user's own `module:function`."""
    return LOSSES.get(name) or plugins.function("loss", name)
