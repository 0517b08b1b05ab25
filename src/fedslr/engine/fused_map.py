"""`tree.map` for cohorts on a GPU: one compiled kernel per tensor, for all clients at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.engine.stacked_layers import has_triton


def apply_to_leaves(fn: Callable[..., Any], trees: list[list[Tensor]]) -> list[Tensor]:
    return [fn(*leaves) for leaves in zip(*trees, strict=True)]


class _Map(torch.autograd.Function):
    """`fn` on the leaves of some trees; under `torch.vmap`, on those of all clients, compiled."""

    @staticmethod
    def forward(fn: Any, trees: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply_to_leaves(fn, _divide(leaves, trees)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, fn: Any, trees: int, *leaves: Tensor) -> Any:
        at = dims[2:]
        whole = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(leaves, at, strict=True)]
        made = compiled()(fn, _divide(whole, trees))
        batched = [any(d is not None for d in of_leaf) for of_leaf in zip(*_divide(at, trees), strict=True)]
        return tuple(made), tuple(0 if b else None for b in batched)


def _divide(flat: Sequence[Any], parts: int) -> list[list[Any]]:
    size = len(flat) // parts
    return [list(flat[i * size : (i + 1) * size]) for i in range(parts)]


_cache: list[Any] = []


def compiled() -> Any:
    """`apply_to_leaves`, compiled for every function and every set of shapes it meets, where there is a compiler."""
    if not has_triton():
        return apply_to_leaves
    if not _cache:
        limits: Any = torch._dynamo.config
        name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"  # before 2.7
        setattr(limits, name, max(getattr(limits, name), 256))
        _cache.append(torch.compile(apply_to_leaves, dynamic=False, options={"combo_kernels": True}))
    return _cache[0]


def _closed_over(fn: Any) -> Iterator[Tensor]:
    """The tensors that a function, and the functions it is made of, refer to."""
    left, seen = [fn], set()
    while left:
        this = left.pop()
        if id(this) in seen:
            continue
        seen.add(id(this))
        for held in _held_by(this):
            for found in pytree.tree_leaves(held):
                if isinstance(found, Tensor):
                    yield found
                else:
                    left.append(found)


def _held_by(fn: Any) -> list[Any]:
    """Return the values that a function refers to: its closure, its defaults and its bound arguments."""
    if isinstance(fn, functools.partial):
        return [fn.func, fn.args, fn.keywords]
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    return [*cells, getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)]


def fuse(fn: Callable[..., Any], trees: list[list[Any]]) -> list[Any]:
    """`tree.map` for cohorts on a GPU."""
    flat = [leaf for leaves in trees for leaf in leaves]
    # Inside _Map a client's own numbers are out of reach, except as leaves.
    own = any(torch._C._functorch.is_batchedtensor(x) for x in _closed_over(fn))
    if own or not flat or not all(isinstance(x, Tensor) for x in flat):
        return apply_to_leaves(fn, trees)
    made: tuple[Tensor, ...] = _Map.apply(fn, len(trees), *flat)
    return list(made)
