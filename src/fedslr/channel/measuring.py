"""Compute the exact size of messages without encoding them."""

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
"""Integer types by bytes per element. The bit pattern of −0.0 is not zero, so every encoding keeps it."""


def measure(tree: Tree) -> Size:
    """Return `encode(tree).size` without encoding. One number per tensor leaves the device, in a single transfer.

    NaN and infinity are not detected.
    """
    leaves = list(leaves_to_send(tree))
    return _size(leaves, _count([x[None] for _, x in leaves if isinstance(x, Tensor)])[0].tolist())


def nonzeros(tree: Tree) -> Tensor:
    """Count the non-zero bit patterns in every client's part of a stacked tree, without waiting for the device.

    The tensors of a stacked tree have the clients as their first axis. The result has the shape (clients, tensors),
    with the tensors in the order of the leaves.
    """
    return _count([leaf for _, leaf in leaves_to_send(tree) if isinstance(leaf, Tensor)])


def sizes(tree: Tree, counts: Array | Tensor) -> list[Size]:
    """Return the size of every client's part of a stacked tree; `counts` are its `nonzeros` in host memory."""
    rows = [tuple(row) for row in counts.tolist()]
    if not rows:
        return []
    leaves = [(path, leaf[0] if isinstance(leaf, Tensor) else leaf) for path, leaf in leaves_to_send(tree)]
    found = {row: _size(leaves, row) for row in set(rows)}
    return [found[row] for row in rows]


def _count(tensors: Sequence[Tensor]) -> Tensor:
    """Return the number of non-zero bit patterns in each client's part of each tensor, shaped (clients, tensors)."""
    if not tensors:
        return torch.zeros(1, 0, dtype=torch.int64)
    counts = []
    for x in tensors:
        # A view keeps the strides. The added last axis of size 1 lets one scalar per client be summed, too.
        patterns = x.detach().view(BIT_PATTERN_TYPES[x.element_size()]).unsqueeze(-1)
        counts.append((patterns != 0).sum(dim=tuple(range(1, patterns.ndim))))
    # Some counters may lie on the CPU. Copying them to the device of the model does not wait.
    device = next((c.device for c in counts if c.device.type != "cpu"), counts[0].device)
    return torch.stack([c.to(device, non_blocking=True) for c in counts], dim=1)


def _size(leaves: Iterable[tuple[Path, Any]], counts: Iterable[int]) -> Size:
    """Return the size of a message with these leaves; `counts` are the non-zeros of its tensors, in order."""
    left = iter(counts)
    plans = [plan_leaf(path, leaf, next(left) if isinstance(leaf, Tensor) else 0) for path, leaf in leaves]
    _, arrays = describe_body(plans)
    return Size(FRAME_HEADER.size + _body_bytes(arrays), sum(plan.numbers for plan in plans))


def _body_bytes(arrays: Mapping[str, ArraySpec]) -> int:
    """Return the length in bytes of the safetensors body with these arrays."""
    return len(safetensors_layout(arrays)[0]) + sum(spec.bytes for spec in arrays.values())
