"""Arithmetic on trees: dictionaries of tensors, possibly nested, such as a model, a gradient or a dual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]

Mapper = Callable[[Callable[..., Any], list[list[Any]]], list[Any]]
"""A function that applies a given function to the leaves of several trees and returns the leaves of the result."""

_mapper: ContextVar[Mapper | None] = ContextVar("mapper", default=None)


@contextmanager
def mapped_by(mapper: Mapper) -> Iterator[None]:
    """Within the block, let `map` apply the mapper of an engine, which computes all leaves at once."""
    token = _mapper.set(mapper)
    try:
        yield
    finally:
        _mapper.reset(token)


def map(fn: Callable[..., Any], first: Tree, *rest: Tree) -> Tree:
    """Apply an element-wise function to the corresponding leaves of several trees with the same keys.

    Args:
        fn: A function of one tensor per tree.
        first: The first tree. The result has its keys, in its order.
        *rest: The other trees.

    Example:
        tree.map(lambda v, w: v - w, model, start)
    """
    mapper = _mapper.get()
    if mapper is None:
        return _map(fn, first, rest)
    made = iter(mapper(fn, [leaves(tree, first) for tree in (first, *rest)]))
    return _map(lambda leaf: next(made), first, ())


def _map(fn: Callable[..., Any], first: Tree, rest: tuple[Tree, ...]) -> Tree:
    out: Tree = {}
    for key, leaf in first.items():
        others = [tree[key] for tree in rest]
        out[key] = _map(fn, leaf, tuple(others)) if isinstance(leaf, dict) else fn(leaf, *others)
    return out


def zeros(params: Tree) -> Tree:
    """Return zeros of the shapes of a tree."""
    return map(torch.zeros_like, params)


def fill(number: Tensor, like: Tree) -> Tree:
    """Return a scalar tensor expanded to the shapes and types of a tree, so that `map` reads it like another tree."""
    typed = {dtype: number.to(dtype) for dtype in {x.dtype for x in leaves(like)}}
    return _map(lambda x: typed[x.dtype].expand(x.shape), like, ())


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return a − b."""
    return map(torch.sub, a, b)


def leaves(tree: Tree, order: Tree | None = None) -> list[Any]:
    """Return the leaves in the order of the keys of `order`; by default in the order of the tree's own keys."""
    out: list[Any] = []
    for key, like in (tree if order is None else order).items():
        out.extend(leaves(tree[key], like) if isinstance(like, dict) else [tree[key]])
    return out


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product ⟨a, b⟩ over all leaves."""
    return torch.stack([(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]).sum()


def norm(a: Tree) -> Tensor:
    """Return the Euclidean norm over all leaves."""
    return dot(a, a).sqrt()


class Mean:
    """A running weighted mean Σ weight·tree / Σ weight. It keeps a single tree in memory."""

    def __init__(self) -> None:
        self.sum: Tree | None = None
        """Σ weight·tree."""
        self.weight = 0.0
        """Σ weight."""

    def add(self, tree: Tree, weight: float = 1.0) -> None:
        """Add a tree."""
        self.add_sum(map(lambda x: x * weight, tree), weight)

    def add_sum(self, weighted: Tree, weight: float) -> None:
        """Add several trees at once, given by their weighted sum and the sum of their weights."""
        self.sum = weighted if self.sum is None else map(torch.add, self.sum, weighted)
        self.weight += weight

    def value(self) -> Tree:
        """Return the mean of the added trees."""
        if self.sum is None:
            raise ValueError("the mean of nothing is not defined")
        total = self.weight
        return map(lambda s: s / total, self.sum)


def mean(trees: list[Tree]) -> Tree:
    """Return the unweighted mean of several trees."""
    out = Mean()
    for tree in trees:
        out.add(tree)
    return out.value()
