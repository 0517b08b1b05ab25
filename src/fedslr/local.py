"""The one local training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from fedslr.types import Batch

Carry = TypeVar("Carry")


def scan(step: Callable[[Carry, Batch], Carry], carry: Carry, batches: Iterable[Batch]) -> Carry:
    """Carry a state through the batches: carry ← step(carry, batch)."""
    for batch in batches:
        carry = step(carry, batch)
    return carry
