"""The one local training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Carry = TypeVar("Carry")
Item = TypeVar("Item")


def scan(step: Callable[[Carry, Item], Carry], carry: Carry, batches: Iterable[Item]) -> Carry:
    """Carry a state through the batches: carry ← step(carry, batch)."""
    for batch in batches:
        carry = step(carry, batch)
    return carry
