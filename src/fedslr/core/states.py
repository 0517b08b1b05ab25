"""States and ledgers as plain trees that can be stored."""

from __future__ import annotations

from typing import Any

from fedslr.core.errors import CheckpointError
from fedslr.core.tree import Tree


def plain(state: Any) -> Tree:
    """Return a NamedTuple of Params, a tree or `()` as a tree that can be written."""
    if hasattr(state, "_asdict"):
        return dict(state._asdict())
    return state if isinstance(state, dict) else {}


def restore(like: Any, tree: Tree) -> Any:
    """Return the state that `plain` made a tree of; `like` is a state of the same kind."""
    if isinstance(like, dict):
        return tree
    if not hasattr(like, "_fields"):
        return ()
    if tree.keys() != set(like._fields):
        kept, wanted = (", ".join(sorted(names)) or "nothing" for names in (tree, like._fields))
        raise CheckpointError(
            f"the checkpoint's {type(like).__name__} has {kept}, but the method's has {wanted}; restore its code"
        )
    return type(like)(**tree)
