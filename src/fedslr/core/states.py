"""Conversion of states and ledgers to plain trees, which can be stored."""

from __future__ import annotations

from typing import Any

from fedslr.core.errors import CheckpointError
from fedslr.core.tree import Tree


def plain(state: Any) -> Tree:
    """Return a NamedTuple of Params, a tree or `()` as a plain tree."""
    if hasattr(state, "_asdict"):
        return dict(state._asdict())
    return state if isinstance(state, dict) else {}


def restore(like: Any, tree: Tree) -> Any:
    """Return the state that `plain` converted to a tree; `like` is any state of the same method."""
    if isinstance(like, dict):
        return tree
    if not hasattr(like, "_fields"):
        return ()
    if tree.keys() != set(like._fields):
        kept, wanted = (", ".join(sorted(names)) or "nothing" for names in (tree, like._fields))
        raise CheckpointError(
            f"the checkpoint's {type(like).__name__} has the fields {kept}, but the method's has {wanted}; restore the "
            "method's earlier code"
        )
    return type(like)(**tree)
