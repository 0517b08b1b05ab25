"""What methods keep to. A person's own that does not is told so, in a line, before it becomes a wrong figure."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.algorithms import naming
from fedslr.core import factored, seeds
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.generators import seeded
from fedslr.core.matrix import LowRank
from fedslr.core.tree import Tree, leaves
from fedslr.core.types import Params, Payload

Update = Callable[..., tuple[Any, Payload]]


def require_states(server: Any, client: Any, kept: bool = True) -> None:
    """Refuse states that could not be kept: what is no NamedTuple would be forgotten.

    Of a run that nobody keeps, a server may hold what it likes.
    """
    for where, state in (("init_server", server), ("init_client", client)):
        if state != () and not hasattr(state, "_asdict"):
            raise FedslrError(f"{where}: got {_kind(state)}, expected a NamedTuple of parameters, or () for nothing")
    for field, leaf in _leaves(server) if kept else ():
        if not (isinstance(leaf, Tensor | LowRank | None) or type(leaf) in (str, int, float, bool, dict)):
            raise FedslrError(f"init_server: '{field}' has {_kind(leaf)} in it, expected tensors, numbers or texts")
    _require_tensors("init_client", client)


def own(given: Any) -> Any:
    """The same in memory of its own: whoever changes it in place changes nobody else's."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


def lent(algorithm: Algorithm[Any, Any], given: Any) -> Any:
    """What a method is given to look at: a person's own may change it in place, and gets a copy."""
    return given if naming.is_in_table(type(algorithm)) else own(given)


def checked_update(update: Update, kind: type | None = None) -> Update:
    """The same function, but that what it makes is looked at; of what kind the new state is, if it matters."""

    @functools.wraps(update)
    def call(task: Any, client: Any, payload: Payload, data: Any, round: Any) -> tuple[Any, Payload]:
        made = update(task, client, payload, data, round)
        name = _name(update)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
            found = f"({', '.join(map(_kind, made))})" if type(made) is tuple and made else _kind(made)
            raise FedslrError(f"{name}: got {found}, expected (the client's new state, its upload as a dictionary)")
        if kind is not None:
            _require_state(name, made[0], kind, client, payload)
        return made

    return call


def checked_state(learn: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """The same for a function that makes a state alone."""

    @functools.wraps(learn)
    def call(task: Any, client: Any, payload: Payload, data: Any, round: Any) -> Any:
        made = learn(task, client, payload, data, round)
        _require_state(_name(learn), made, kind, client, payload)
        return made

    return call


def require_upload(upload: Payload, broadcast: Payload, stacked: bool = False) -> None:
    """Refuse an upload that is not shaped as the broadcast is: it might be added to it all the same."""
    try:
        factored.require_alike(_first(upload) if stacked else upload, broadcast, "upload")
    except WireError as error:
        raise FedslrError(f"local_update: {error}; expected what is in the broadcast, and of its shapes") from None


def aggregated(
    algorithm: Algorithm[Any, Any], server: Any, mean: Payload, cohort_size: int, like: Params, seed: int, round: int
) -> Any:
    """The server of a simulation after a round. Noise that a person's own method adds is that of the seed and the
    round, so that all processes add the same, and a resumed run does."""
    drawn: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not naming.is_in_table(type(algorithm)):
        drawn = seeded(seeds.integer(seeds.AGGREGATE, seed, round), next(iter(like.values())).device)
    with drawn:
        return checked_server(algorithm.aggregate(server, mean, cohort_size), server, like)


def checked_server(made: Any, before: Any, like: Params) -> Any:
    """What `aggregate` made, which is a server as the one before was, of a model with these parameters."""
    if type(made) is not type(before):
        raise FedslrError(f"aggregate: got {_kind(made)}, expected the server's new state, {_written(type(before))}")
    if before != ():
        _require_shapes("aggregate", "the server's state", _fields(made), _fields(before), like)
    return made


def checked_broadcast(made: Any) -> Payload:
    """What `broadcast` made, which can be sent."""
    if not isinstance(made, dict):
        raise FedslrError(f"broadcast: got {_kind(made)}, expected a dictionary of tensors")
    for leaf in leaves(made):
        if not isinstance(leaf, Tensor | LowRank):
            raise FedslrError(f"broadcast: it has {_kind(leaf)} in it, expected tensors")
    return made


def checked_model(name: str, made: Any, like: Params) -> Params:
    """What `global_model` or `personal_model` made, which are the model's parameters."""
    if not isinstance(made, Mapping):
        raise FedslrError(f"{name}: got {_kind(made)}, expected a dictionary of the model's parameters")
    if missing := [k for k in like if k not in made]:
        raise FedslrError(f"{name}: '{missing[0]}' is missing, expected all of the model's parameters")
    _require_shapes(name, "the model", made, like, like)
    return dict(made)


def checked_weights(weights: Sequence[float]) -> Sequence[float]:
    if wrong := [w for w in weights if isinstance(w, str) or not hasattr(w, "__float__")]:
        raise FedslrError(f"weight: got {_kind(wrong[0])}, expected a number")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        raise FedslrError(f"weight: got {list(weights)}, expected numbers from 0 that are not all 0")
    return weights


def what_to_lower(algorithm: Algorithm[Any, Any]) -> str:
    """What may help a global model that diverges."""
    return "lr or eta_g" if hasattr(algorithm, "eta_g") else "lr"


def _require_state(name: str, made: Any, kind: type, before: Any, payload: Payload) -> None:
    if type(made) is not kind:
        raise FedslrError(f"{name}: got {_kind(made)} as the client's new state, expected {_written(kind)}")
    _require_tensors(name, made)
    if made != () and type(before) is kind:
        _require_shapes(name, "the client's state", _fields(made), _fields(before), payload)


def _require_shapes(name: str, what: str, made: Any, before: Any, like: Mapping[str, Any], at: str = "") -> None:
    """Refuse what was shaped as the parameter of its name and is not any more; of all else nothing is said."""
    if isinstance(made, Mapping) and isinstance(before, Mapping):
        for key in [key for key in before if key in made]:
            _require_shapes(name, what, made[key], before[key], like, f"{at}/{key}" if at else str(key))
    elif isinstance(made, Tensor | LowRank) and isinstance(before, Tensor | LowRank):
        found, wanted, parameter = list(made.shape), list(before.shape), like.get(at.rpartition("/")[2])
        if found != wanted and isinstance(parameter, Tensor | LowRank) and list(parameter.shape) == wanted:
            raise FedslrError(f"{name}: '{at}' of {what} has shape {found}, expected {wanted}")


def _fields(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = state._asdict()
    return found


def _require_tensors(name: str, state: Any) -> None:
    for field, leaf in _leaves(state):
        if not isinstance(leaf, Tensor | LowRank | None):
            raise FedslrError(f"{name}: '{field}' of the client's state has {_kind(leaf)} in it, expected tensors")


def _leaves(state: Any) -> list[tuple[str, Any]]:
    """All that a state holds, each with the name of its field."""
    return [] if state == () else [(field, leaf) for field, x in _fields(state).items() for leaf in leaves({field: x})]


def _first(stacked: Tree) -> Tree:
    """The shape and type of one of many, without its numbers."""
    one: Tree = pytree.tree_map(
        lambda x: torch.empty(x.shape[1:], dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x, stacked
    )
    return one


def _name(function: Any) -> str:
    return getattr(function, "__name__", "local_update")


def _kind(made: Any) -> str:
    return "()" if isinstance(made, tuple) and not made else type(made).__name__


def _written(kind: type) -> str:
    return "()" if kind is tuple else kind.__name__
