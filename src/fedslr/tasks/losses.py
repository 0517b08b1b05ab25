"""Losses by name: the built-in ones, and users' own functions."""

from __future__ import annotations

from torch.nn.functional import cross_entropy

from fedslr.core import plugins
from fedslr.core.types import Loss

LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy}


def find(name: str) -> Loss:
    """Return a built-in loss, or a user's own function by its `module:function`."""
    return LOSSES.get(name) or plugins.function("loss", name, "outputs", "labels")
