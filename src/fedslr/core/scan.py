"""The local training loop, which engines may run in their own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

Carry = TypeVar("Carry")
Item = TypeVar("Item")


@runtime_checkable
class Walk(Protocol):
    """Batches of an engine that runs the training loop in its own way."""

    def scan(self, step: Callable[[Any, Any], Any], carry: Any) -> Any: ...


def scan(step: Callable[[Carry, Item], Carry], carry: Carry, batches: Iterable[Item]) -> Carry:
    """Carry a state through the batches: carry ← step(carry, batch).

    Args:
        step: A function of the state and a batch that returns the next state. It must not branch on values.
        carry: The first state: a tensor, a tree, or a tuple of these.
        batches: The batches of a client, from `data.epochs` or `data.pairs`.

    Returns:
        The last state.
    """
    if isinstance(batches, Walk):
        carried: Carry = batches.scan(step, carry)
        return carried
    for batch in batches:
        carry = step(carry, batch)
    return carry
