"""The exact size of messages that are never built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedslr.channel.layout import FRAME_HEADER, Array, ArraySpec, Size, describe_body, plan_leaf, safetensors_layout
from fedslr.channel.packing import leaves_to_send
from fedslr.core.factored import Path
from fedslr.core.tree import Tree

BIT_PATTERN_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes. As a bit pattern a negative zero is not zero, so that every encoding is exact."""


def measure(tree: Tree) -> Size:
    """Return `encode(tree).size` without encoding: only one number per tensor leaves the device, in one transfer.

    NaN and infinity are not looked for.
    """
    leaves = list(leaves_to_send(tree))
    return _size(leaves, _count([x[None] for _, x in leaves if isinstance(x, Tensor)])[0].tolist())


def nonzeros(tree: Tree, stacked: bool) -> Tensor:
    """Count the elements of each tensor that are not zero as bit patterns, without waiting for the device.

    Returns:
        A tensor (clients, tensors) for a stacked tree, whose tensors have the clients as their first axis; else
        (tensors,). Tensors are in the order of the leaves. Factors count as the dense tensor if they are sent as one.
    """
    tensors = [leaf for _, leaf in leaves_to_send(tree) if isinstance(leaf, Tensor)]
    return _count(tensors) if stacked else _count([x[None] for x in tensors])[0]


def sizes(tree: Tree, counts: Array | Tensor) -> list[Size]:
    """Return the size of every client's part of a stacked tree, given its `nonzeros` in the host's memory."""
    rows = [tuple(row) for row in counts.tolist()]
    if not rows:
        return []
    leaves = [(path, leaf[0] if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves_to_send(tree)]
    found = {row: _size(leaves, row) for row in set(rows)}
    return [found[row] for row in rows]


def _count(tensors: Sequence[Tensor]) -> Tensor:
    """Return (clients, tensors): the bit patterns that are not zero in each client's part of each tensor."""
    if not tensors:
        return torch.zeros(1, 0, dtype=torch.int64)
    counts = []
    for x in tensors:
        # A view keeps whatever strides there are; a last axis of 1 gives even a scalar per client one to sum over.
        patterns = x.detach().view(BIT_PATTERN_TYPES[x.element_size()]).unsqueeze(-1)
        counts.append((patterns != 0).sum(dim=tuple(range(1, patterns.ndim))))
    # A tree may keep a counter or two on the CPU; they go to where the model is, which waits for nothing.
    device = next((c.device for c in counts if c.device.type != "cpu"), counts[0].device)
    return torch.stack([c.to(device, non_blocking=True) for c in counts], dim=1)


def _size(leaves: Iterable[tuple[Path, Any]], counts: Iterable[int]) -> Size:
    """Return the size of a message of these leaves, given the non-zeros of each tensor among them, in order."""
    left = iter(counts)
    plans = [plan_leaf(path, leaf, next(left) if isinstance(leaf, Tensor) else 0) for path, leaf in leaves]
    _, arrays = describe_body(plans)
    return Size(FRAME_HEADER.size + _body_bytes(arrays), sum(plan.numbers for plan in plans))


def _body_bytes(arrays: Mapping[str, ArraySpec]) -> int:
    """Return the length of the safetensors body of such arrays."""
    return len(safetensors_layout(arrays)[0]) + sum(spec.bytes for spec in arrays.values())
