"""Losses by name: the one everybody has, and people's own."""

from __future__ import annotations

from torch.nn.functional import cross_entropy

from fedslr import plugins
from fedslr.errors import FedslrError
from fedslr.types import Loss

LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy}


def find(name: str) -> Loss:
    """The loss of a name: one of the table, or `module:function` of a person's own."""
    if name in LOSSES:
        return LOSSES[name]
    # Not guarded: engines trace a loss and compile it, and what goes wrong in it is told where a model is checked.
    found: Loss = plugins.find("loss", name)
    if not callable(found):
        raise FedslrError(f"loss: got '{name}', which is a {type(found).__name__}, expected a function")
    return found
