"""Functions of trees whose matrices may be low-rank factors, such as broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from fedslr.core.errors import WireError
from fedslr.core.matrix import LowRank
from fedslr.core.tree import Tree

Path = tuple[str, ...]


def factors_are_smaller(leaf: LowRank) -> bool:
    """Return whether the factors have fewer entries than the matrix, r(m + n) < mn.

    Only such factors are sent as factors, and only such factors reduce the size of a model.
    """
    return leaf.numbers < prod(leaf.shape)


def smaller_form(leaf: Any) -> Any:
    """Return factors as a dense tensor unless the factors are smaller; return any other leaf unchanged."""
    return leaf.dense() if isinstance(leaf, LowRank) and not factors_are_smaller(leaf) else leaf


def smaller_forms(tree: Tree) -> Tree:
    """Return a tree as a message or a file restores it: with factors only if they are smaller than the matrix."""
    return {k: smaller_forms(x) if isinstance(x, dict) else smaller_form(x) for k, x in tree.items()}


def multiply_out(tree: Tree, check: bool = True) -> Tree:
    """Return a tree with dense tensors in place of all factors, the form that clients work with.

    Args:
        tree: Tensors and factors.
        check: Whether to refuse a product that is not finite. The check waits for a GPU once per matrix.

    Raises:
        WireError: A product is not finite.
    """
    out: Tree = {}
    for key, leaf in tree.items():
        if isinstance(leaf, LowRank):
            out[key] = leaf.dense()
            if check:
                require_finite_tensor(out[key], (key,))
        else:
            out[key] = multiply_out(leaf, check) if isinstance(leaf, dict) else leaf
    return out


def tensors_of(leaf: Any) -> list[Tensor]:
    """Return the tensors of a leaf: the tensor itself, two factors, or no tensor for a plain value."""
    if isinstance(leaf, LowRank):
        return [leaf.u, leaf.v]
    return [leaf] if isinstance(leaf, Tensor) else []


def path_name(path: Iterable[str]) -> str:
    """Return a path for an error message as one short line of ASCII, because a sender may be hostile."""
    return ascii("/".join(path))[1:-1][:100]


def leaves_with_paths(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of every leaf; an empty dictionary is a leaf."""
    for key, leaf in tree.items():
        if isinstance(leaf, dict) and leaf:
            yield from leaves_with_paths(leaf, (*path, key))
        else:
            yield (*path, key), leaf


def require_finite_tensor(x: Tensor, path: Path) -> None:
    """Refuse a tensor with NaN or infinity."""
    # A finite sum proves that all entries are finite. Otherwise the sum may have overflowed: check every entry.
    if x.is_floating_point() and not isfinite(float(x.detach().sum())) and not bool(torch.isfinite(x).all()):
        raise WireError(f"'{path_name(path)}' has numbers that are not finite (NaN or infinity)")


def require_finite(tree: Tree) -> None:
    """Refuse a tree with NaN or infinity; the error names the first tensor with one."""
    for path, leaf in leaves_with_paths(tree):
        for x in tensors_of(leaf):
            require_finite_tensor(x, path)


def require_alike(found: Tree, like: Tree, where: str) -> None:
    """Refuse a tree unless it has the keys of the tree `like`, and tensors of the same shapes and types."""
    for key in {**like, **found}:
        path = f"{where}/{path_name([key])[:50]}"
        if key not in found or key not in like:
            raise WireError(f"'{path}' is {'missing' if key in like else 'unexpected'}")
        got, expected = _form(found[key]), _form(like[key])
        if got != expected:
            raise WireError(f"'{path}' is {got}, expected {expected}")
        if isinstance(like[key], dict):
            require_alike(found[key], like[key], path)


def _form(leaf: Any) -> str:
    """Return a leaf's kind, and for a tensor its shape and type."""
    parts = tensors_of(leaf)
    return f"{list(leaf.shape)} of {parts[0].dtype}".replace("torch.", "") if parts else f"a {type(leaf).__name__}"


def each_tensor(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply a function to every tensor of a tree, including factors."""

    def made(leaf: Any) -> Any:
        if isinstance(leaf, LowRank):
            return LowRank(fn(leaf.u), fn(leaf.v), leaf.shape)
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return {k: each_tensor(fn, x) if isinstance(x, dict) else made(x) for k, x in tree.items()}


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Return a tree with every tensor on a device."""
    return each_tensor(lambda x: x.to(device), tree)


def to_host(tree: Tree) -> Tree:
    """Return a tree in the host's memory, with factors only if they are smaller than the matrix.

    Other factors are multiplied on their own device, because another device rounds differently.
    """
    return to_device(smaller_forms(tree), "cpu")
