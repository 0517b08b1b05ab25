"""Arithmetic on Params: a model, a gradient, a dual are all dictionaries of tensors, possibly nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = dict[str, Any]


Mapper = Callable[[Callable[..., Any], list[list[Any]]], list[Any]]
"""A function and, for every tree, its leaves, to the leaves of the result."""

_mapper: ContextVar[Mapper | None] = ContextVar("mapper", default=None)


@contextmanager
def mapped_by(mapper: Mapper) -> Iterator[None]:
    """Let an engine do the work of `map`, all leaves at once, while this lasts."""
    token = _mapper.set(mapper)
    try:
        yield
    finally:
        _mapper.reset(token)


def map(fn: Callable[..., Any], first: Tree, *rest: Tree) -> Tree:
    """Apply an element-wise `fn` leaf by leaf to trees of the same shape."""
    mapper = _mapper.get()
    if mapper is None:
        return _map(fn, first, rest)
    fn, (first, *others) = _joined(fn, [first, *rest])
    made = iter(mapper(fn, [leaves(first), *(_aligned(first, tree) for tree in others)]))
    return _map(lambda leaf: next(made), first, ())


def later(fn: Callable[..., Any], first: Tree, *rest: Tree) -> Tree:
    """What `map` gives, for the next `map` to use: where an engine does the work of both, it does it in one go."""
    return map(fn, first, *rest) if _mapper.get() is None else _Later(fn, [first, *rest])


class _Later(Tree):
    """A tree that is made when somebody looks at it."""

    def __init__(self, fn: Callable[..., Any], trees: list[Tree]) -> None:
        super().__init__()
        self.fn, self.trees = fn, trees
        self.made = False

    def _look(self) -> Tree:
        if not self.made:
            self.made = True
            dict.update(self, map(self.fn, *self.trees))
        return self


def _look_first(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def looking(self: _Later, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return method(self, *args, **kwargs)

    return looking


LOOKING = (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__len__", "__contains__", "__eq__",
    "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "get", "keys", "values", "items", "copy", "pop", "popitem",
    "setdefault", "update", "clear",
)  # fmt: skip
for _name in LOOKING:
    setattr(_Later, _name, _look_first(_name))


pytree.register_pytree_node(
    _Later, lambda tree: (list(tree.values()), list(tree)), lambda leaves, keys: dict(zip(keys, leaves, strict=True))
)


def _joined(fn: Callable[..., Any], trees: list[Tree]) -> tuple[Callable[..., Any], list[Tree]]:
    """`fn` after the functions of those trees that are yet to be made, and the trees they are made of."""
    if not any(_waits(tree) for tree in trees):
        return fn, trees
    sources = [(tree.fn, tree.trees) if _waits(tree) else (None, [tree]) for tree in trees]
    parts = tuple((part, len(of)) for part, of in sources)

    def joined(*leaves: Any) -> Any:
        given, at = [], 0
        for part, count in parts:
            given.append(leaves[at] if part is None else part(*leaves[at : at + count]))
            at += count
        return fn(*given)

    return joined, [tree for _, of in sources for tree in of]


def _waits(tree: Tree) -> TypeGuard[_Later]:
    return isinstance(tree, _Later) and not tree.made


def _map(fn: Callable[..., Any], first: Tree, rest: tuple[Tree, ...]) -> Tree:
    out: Tree = {}
    for key, leaf in first.items():
        others = [tree[key] for tree in rest]
        out[key] = _map(fn, leaf, tuple(others)) if isinstance(leaf, dict) else fn(leaf, *others)
    return out


def _aligned(first: Tree, other: Tree) -> list[Any]:
    """The leaves of a tree, in the order of the first tree's keys."""
    out: list[Any] = []
    for key, leaf in first.items():
        out.extend(_aligned(leaf, other[key]) if isinstance(leaf, dict) else [other[key]])
    return out


def zeros(params: Tree) -> Tree:
    return map(torch.zeros_like, params)


def add(a: Tree, b: Tree) -> Tree:
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(torch.sub, a, b)


def leaves(tree: Tree) -> list[Any]:
    """The leaves, in the order of the keys."""
    out: list[Any] = []
    for leaf in tree.values():
        out.extend(leaves(leaf) if isinstance(leaf, dict) else [leaf])
    return out


def dot(a: Tree, b: Tree) -> Tensor:
    """The inner product ⟨a, b⟩ over all leaves."""
    return torch.stack([(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]).sum()


def norm(a: Tree) -> Tensor:
    """The Euclidean norm over all leaves."""
    return dot(a, a).sqrt()


def remean(mean: Tree, before: int, after: int, leaving: Tree | None = None) -> Tree:
    """The mean of `before` trees once there are `after`: new ones are zero, and one may leave."""
    kept = map(lambda x: x * before, mean)
    return map(lambda x: x / after, kept if leaving is None else sub(kept, leaving))


class Mean:
    """A weighted mean that holds one tree, however many are added: Σ weight·tree / Σ weight."""

    def __init__(self) -> None:
        self._sum: Tree | None = None
        self._weight = 0.0

    def add(self, tree: Tree, weight: float = 1.0) -> None:
        if self._sum is None:
            self._sum = map(lambda x: x * weight, tree)
        else:
            self._sum = map(lambda s, x: s.add(x, alpha=weight), self._sum, tree)
        self._weight += weight

    def value(self) -> Tree:
        if self._sum is None:
            raise ValueError("the mean of nothing is not defined")
        total = self._weight
        return map(lambda s: s / total, self._sum)


def mean(trees: list[Tree]) -> Tree:
    """The plain mean of several trees."""
    out = Mean()
    for tree in trees:
        out.add(tree)
    return out.value()
