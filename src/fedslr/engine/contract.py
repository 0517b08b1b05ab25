"""What methods keep to. A person's own that does not is told so, in a line, before it becomes a wrong figure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedslr import wire
from fedslr.errors import FedslrError, WireError
from fedslr.tree import leaves
from fedslr.types import Payload

Update = Callable[..., tuple[Any, Payload]]


def require_states(server: Any, client: Any) -> None:
    """Refuse states that could not be kept: what is no NamedTuple would be forgotten."""
    for where, state in (("init_server", server), ("init_client", client)):
        if state != () and not hasattr(state, "_asdict"):
            raise FedslrError(f"{where}: got {_kind(state)}, expected a NamedTuple of parameters, or () for nothing")
    for name, part in client._asdict().items() if client != () else ():
        if not all(isinstance(x, Tensor) for x in leaves({name: part})):
            raise FedslrError(
                f"init_client: '{name}' is of type {_kind(part)}, expected tensors, or dictionaries of them"
            )


def checked_update(update: Update) -> Update:
    """The same function, but that what it makes is looked at."""

    @functools.wraps(update)
    def call(task: Any, client: Any, payload: Payload, data: Any, round: Any) -> tuple[Any, Payload]:
        before = _versions(payload)
        made = update(task, client, payload, data, round)
        name = update.__name__
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
            raise FedslrError(f"{name}: got {_kind(made)}, expected the client's new state and its upload")
        _require_same_kind(name, made[0], client)
        try:
            wire.require_alike(made[1], payload, "upload")
        except WireError as error:
            raise FedslrError(f"{name}: {error}, as in what was sent") from None
        _require_untouched(name, payload, before)
        return made

    return call


def checked_state(learn: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function that makes a state alone."""

    @functools.wraps(learn)
    def call(task: Any, client: Any, payload: Payload, data: Any, round: Any) -> Any:
        before = _versions(payload)
        made = learn(task, client, payload, data, round)
        _require_same_kind(learn.__name__, made, client)
        _require_untouched(learn.__name__, payload, before)
        return made

    return call


def checked_weights(weights: Sequence[float]) -> Sequence[float]:
    if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        raise FedslrError(f"weight: got {list(weights)}, expected numbers from 0 that are not all 0")
    return weights


def _require_same_kind(name: str, made: Any, before: Any) -> None:
    if type(made) is not type(before):
        raise FedslrError(f"{name}: got {_kind(made)} as the client's new state, expected {_kind(before)}")


def _require_untouched(name: str, payload: Payload, before: list[int]) -> None:
    # All clients are sent the same tensors.
    if _versions(payload) != before:
        raise FedslrError(f"{name}: it changes what the client was sent in place; expected new tensors, as v - lr * g")


def _versions(payload: Payload) -> list[int]:
    return [x._version for x in leaves(payload) if isinstance(x, Tensor)]


def _kind(made: Any) -> str:
    return "()" if isinstance(made, tuple) and not made else type(made).__name__
