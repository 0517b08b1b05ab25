"""States as plain trees that can be stored."""

from __future__ import annotations

from typing import Any

from fedslr.core.errors import CheckpointError
from fedslr.core.tree import Tree


def plain(state: tuple[Any, ...]) -> Tree:
    """A NamedTuple of Params as a tree that can be written."""
    return dict(state._asdict()) if hasattr(state, "_asdict") else {}


def restore(kind: type[Any], tree: Tree) -> Any:
    """The NamedTuple of `plain`; the empty tuple for a method that keeps nothing."""
    if not hasattr(kind, "_fields"):
        return ()
    if tree.keys() != set(kind._fields):
        kept, wanted = (", ".join(sorted(names)) or "nothing" for names in (tree, kind._fields))
        raise CheckpointError(f"what was kept has {kept}, but the method's {kind.__name__} has {wanted}")
    return kind(**tree)
