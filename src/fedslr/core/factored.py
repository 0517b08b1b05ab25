"""Trees whose matrices may be low-rank factors."""

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


def as_factors(leaf: LowRank) -> bool:
    """Whether a layer travels as factors: only where they are fewer numbers than the matrix, r(m + n) < mn.

    What counts as a model's size counts them so too, and must not depend on where a model has been.
    """
    return leaf.numbers < prod(leaf.shape)


def settle(leaf: Any) -> Any:
    """Factors that are no smaller than their matrix are multiplied out."""
    return leaf.dense() if isinstance(leaf, LowRank) and not as_factors(leaf) else leaf


def path_name(path: Iterable[str]) -> str:
    """A path for a message to people: one short line, whatever a sender called it."""
    return ascii("/".join(path))[1:-1][:100]


def leaves_with_paths(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, leaf in tree.items():
        if isinstance(leaf, dict) and leaf:
            yield from leaves_with_paths(leaf, (*path, key))
        else:
            yield (*path, key), leaf


def require_finite_tensor(x: Tensor, path: Path) -> None:
    # A sum meets every NaN and infinity, so a finite one clears the tensor; overflow alone needs the second look.
    if x.is_floating_point() and not isfinite(float(x.detach().sum())) and not bool(torch.isfinite(x).all()):
        raise WireError(f"'{path_name(path)}' has numbers that are not finite (NaN or infinity)")


def require_alike(found: Tree, like: Tree, where: str) -> None:
    """A WireError unless two trees have the same keys, and tensors of the same shapes and types."""
    for key in [*like, *(key for key in found if key not in like)]:
        path = f"{where}/{ascii(key)[1:-1][:50]}"
        if key not in found:
            raise WireError(f"'{path}' is missing")
        if key not in like:
            raise WireError(f"'{path}' is not part of it")
        a, b = found[key], like[key]
        if isinstance(b, dict):
            if not isinstance(a, dict):
                raise WireError(f"'{path}' is a tensor, expected a table")
            require_alike(a, b, path)
        elif not isinstance(a, Tensor | LowRank):
            raise WireError(f"'{path}' is no tensor")
        else:
            kind = a.u.dtype if isinstance(a, LowRank) else a.dtype
            if tuple(a.shape) != tuple(b.shape) or kind != b.dtype:
                got, expected = (
                    f"{list(s)} of {str(k).removeprefix('torch.')}" for s, k in ((a.shape, kind), (b.shape, b.dtype))
                )
                raise WireError(f"'{path}' is {got}, expected {expected}")


def require_finite(tree: Tree) -> None:
    """A WireError that names the first tensor with NaN or infinity."""
    for path, leaf in leaves_with_paths(tree):
        for x in leaf[:2] if isinstance(leaf, LowRank) else [leaf]:
            if isinstance(x, Tensor):
                require_finite_tensor(x, path)


def each_tensor(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """A tree with every tensor, those of factors too, replaced by what a function makes of it."""

    def made(leaf: Any) -> Any:
        if isinstance(leaf, LowRank):
            return LowRank(fn(leaf.u), fn(leaf.v), leaf.shape)
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return {k: each_tensor(fn, x) if isinstance(x, dict) else made(x) for k, x in tree.items()}


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Every tensor of a decoded tree on a device."""
    return each_tensor(lambda x: x.to(device), tree)


def compact(tree: Tree) -> Tree:
    """Factors only where they are smaller than the matrix: how a tree comes back from the wire or the disk."""
    return {k: compact(x) if isinstance(x, dict) else settle(x) for k, x in tree.items()}


def to_host(tree: Tree) -> Tree:
    """A tree in the host's memory, compact. Factors are multiplied where they were: another device rounds otherwise."""
    return to_device(compact(tree), "cpu")


def unfold(tree: Tree, check: bool = True) -> Tree:
    """Every factorised matrix multiplied out: what a client works with. The product is checked to be finite.

    Whoever looks at all of it at once does without the check, which waits for a GPU matrix by matrix.
    """
    out: Tree = {}
    for key, leaf in tree.items():
        if isinstance(leaf, LowRank):
            out[key] = leaf.dense()
            if check:
                require_finite_tensor(out[key], (key,))
        else:
            out[key] = unfold(leaf, check) if isinstance(leaf, dict) else leaf
    return out


def settled(tree: Tree) -> Tree:
    """A tree with factors only where they travel as such, so that who looks at it next need not multiply them again."""
    return {key: settled(leaf) if isinstance(leaf, dict) else settle(leaf) for key, leaf in tree.items()}
