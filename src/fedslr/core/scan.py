"""The one local training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

Carry = TypeVar("Carry")
Item = TypeVar("Item")


@runtime_checkable
class Walk(Protocol):
    """Batches of an engine that runs the loop in its own way."""

    def scan(self, step: Callable[[Any, Any], Any], carry: Any) -> Any: ...


def scan(step: Callable[[Carry, Item], Carry], carry: Carry, batches: Iterable[Item]) -> Carry:
    """Carry a state through the batches: carry ← step(carry, batch).

    An engine's batches may run the loop themselves.
    """
    if isinstance(batches, Walk):
        carried: Carry = batches.scan(step, carry)
        return carried
    for batch in batches:
        carry = step(carry, batch)
    return carry
