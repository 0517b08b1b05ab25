"""Losses by name: the one everybody has, and people's own."""

from __future__ import annotations

from torch.nn.functional import cross_entropy

from fedslr.core import plugins
from fedslr.core.types import Loss

LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy}


def find(name: str) -> Loss:
    """The loss of a name: one of the table, or `module:function` of a person's own."""
    # Not guarded: engines trace a loss and compile it, and what goes wrong in it is told where a model is checked.
    return LOSSES.get(name) or plugins.function("loss", name)
