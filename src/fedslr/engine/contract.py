"""Checks of what a method returns: a clear error instead of a wrong figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.core import factored
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.matrix import LowRank
from fedslr.core.tree import leaves
from fedslr.core.types import Params, Payload


def private_copy(given: Any) -> Any:
    """Return a copy that a method may change in place."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


def require_state(where: str, state: Any) -> Any:
    """Refuse a client's state that is neither `()` nor a NamedTuple of tensors: it could not be stored."""
    if state == ():
        return state
    if not hasattr(state, "_asdict") or not _is_tree(state._asdict()):
        raise FedslrError(
            f"{where}: got {type(state).__name__}, expected a NamedTuple of parameters, or () for nothing"
        )
    return state


def require_storable(where: str, state: Any) -> Any:
    """Refuse a server state or a ledger that a checkpoint would lose."""
    if not (isinstance(state, dict) or hasattr(state, "_asdict") or (isinstance(state, tuple) and not state)):
        raise FedslrError(
            f"{where}: got {type(state).__name__}, which no checkpoint can hold; return a NamedTuple or a dictionary "
            "of parameters, or () for nothing"
        )
    return state


def require_update(made: Any, payload: Payload) -> tuple[Any, Payload]:
    """Refuse what is not (state, upload), and an upload that has another form than the payload."""
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        got = "a tuple of other things" if isinstance(made, tuple) else type(made).__name__
        raise FedslrError(f"local_update: got {got}, expected (the client's new state, its upload as a dictionary)")
    if any(isinstance(x, LowRank) for x in leaves(made[1])):
        raise FedslrError("local_update: the upload has low-rank factors; multiply them out with x.dense()")
    try:
        factored.require_alike(made[1], payload, "upload")
    except WireError as error:
        raise FedslrError(f"local_update: {error}; expected the keys and shapes of the broadcast") from None
    return require_state("local_update", made[0]), made[1]


def require_broadcast(made: Any) -> Payload:
    """Refuse a broadcast that cannot be sent."""
    if not isinstance(made, dict) or not _is_tree(made):
        raise FedslrError("broadcast: expected a dictionary of tensors, or of such dictionaries, with texts as keys")
    return made


def _is_tree(made: Any) -> bool:
    """Return whether a value consists of tensors in dictionaries whose keys are texts."""
    if isinstance(made, dict):
        return all(isinstance(key, str) and _is_tree(x) for key, x in made.items())
    return isinstance(made, Tensor | LowRank)


def require_model(name: str, made: Any, like: Params) -> Params:
    """Refuse a model that lacks parameters or has parameters of other shapes."""
    if not isinstance(made, Mapping):
        raise FedslrError(f"{name}: got {type(made).__name__}, expected a dictionary of the model's parameters")
    for key, x in like.items():
        if key not in made or made[key].shape != x.shape:
            raise FedslrError(f"{name}: '{key}' is missing or has another shape, expected {list(x.shape)}")
    return dict(made)
