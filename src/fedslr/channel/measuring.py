"""The exact size of messages that are never built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedslr.channel.layout import FRAME, Array, Part, Size, describe, plan_leaf, safetensors_layout
from fedslr.channel.packing import settled_leaves
from fedslr.core.factored import Path, leaves_with_paths
from fedslr.core.matrix import LowRank
from fedslr.core.tree import Tree

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes: bit patterns, to which a negative zero is not zero."""


def measure(tree: Tree) -> Size:
    """`encode(tree).size`, without the message: one number per tensor leaves the device, all in one transfer.

    Whether the tensors are finite is not looked at.
    """
    leaves = list(settled_leaves(tree))
    return _size(leaves, _count([x[None] for _, x in leaves if isinstance(x, Tensor)])[0].tolist())


def nonzeros(tree: Tree, stacked: bool) -> Tensor:
    """How many elements of each tensor are not zero as bit patterns, in the order of the leaves, on their device.

    Of a stacked tree, whose tensors have the clients as their first axis: (clients, tensors); else (tensors,). Nothing
    waits for the device. Factors are counted as the tensor they travel as, if they do not travel as factors.
    """
    if stacked:
        return _count([leaf for _, leaf in _stacked(tree) if isinstance(leaf, Tensor)])
    return _count([leaf[None] for _, leaf in settled_leaves(tree) if isinstance(leaf, Tensor)])[0]


def sizes(tree: Tree, counts: Array | Tensor) -> list[Size]:
    """What `measure` says of every client's part of a stacked tree, from its `nonzeros` once they are on the host."""
    rows: list[list[int]] = counts.tolist()
    if not rows:
        return []
    leaves = [(path, leaf[0] if isinstance(leaf, Tensor) else leaf) for path, leaf in _stacked(tree)]
    found = {row: _size(leaves, row) for row in {tuple(row) for row in rows}}
    return [found[tuple(row)] for row in rows]


def _stacked(tree: Tree) -> list[tuple[Path, Any]]:
    """The leaves of a tree whose tensors have the clients as their first axis; a ValueError for any other."""
    if any(isinstance(leaf, LowRank) for _, leaf in leaves_with_paths(tree)):
        raise ValueError("factors cannot be stacked: clients differ in rank; measure each client's tree by itself")
    leaves = list(settled_leaves(tree))
    first = {tuple(leaf.shape[:1]) for _, leaf in leaves if isinstance(leaf, Tensor)}
    if len(first) != 1 or first == {()}:
        raise ValueError("a stacked tree has tensors, all with the clients as their first axis")
    return leaves


def _count(tensors: Sequence[Tensor]) -> Tensor:
    """(clients, tensors): the bit patterns that are not zero in each client's part of each tensor."""
    if not tensors:
        return torch.zeros(1, 0, dtype=torch.int64)
    counts = []
    for x in tensors:
        # A view keeps whatever strides there are; a last axis of 1 gives even a scalar per client one to sum over.
        patterns = x.detach().view(PATTERNS[x.element_size()]).unsqueeze(-1)
        counts.append((patterns != 0).sum(dim=tuple(range(1, patterns.ndim))))
    # A tree may keep a counter or two on the CPU; they go to where the model is, which waits for nothing.
    device = next((c.device for c in counts if c.device.type != "cpu"), counts[0].device)
    return torch.stack([c.to(device, non_blocking=True) for c in counts], dim=1)


def _size(leaves: Iterable[tuple[Path, Any]], counts: Iterable[int]) -> Size:
    """The size of a message with these settled leaves, given the non-zeros of each tensor among them, in order."""
    left = iter(counts)
    plans = [plan_leaf(path, leaf, next(left) if isinstance(leaf, Tensor) else 0) for path, leaf in leaves]
    _, parts = describe(plans)
    return Size(FRAME.size + _body_bytes(parts), sum(plan.numbers for plan in plans))


def _body_bytes(parts: Mapping[str, Part]) -> int:
    """The length of what safetensors makes of such arrays."""
    return len(safetensors_layout(parts)[0]) + sum(part.bytes for part in parts.values())
