"""The bound on the norm of one upload: a longer upload is scaled, and both sides book the scaled upload in full."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.types import Payload


def scale_within(algorithm: Algorithm[Any, Any, Any], upload: Payload, bound: float | None) -> float:
    """Return the factor, at most 1, that brings the bounded part of an upload to a norm of at most `bound`."""
    part = algorithm.clipped(upload)
    if bound is None or not tree.leaves(part):
        return 1.0
    norm = float(tree.norm(tree.map(Tensor.double, part)))
    return bound / norm if norm > bound else 1.0


def scaled(algorithm: Algorithm[Any, Any, Any], upload: Payload, scale: float) -> Payload:
    """Return an upload with its bounded part multiplied by a factor; server and node get the same bits."""
    return upload if scale == 1 else _scaled(upload, algorithm.clipped(upload), scale)


def _scaled(upload: Payload, part: Payload, scale: float) -> Payload:
    out = dict(upload)
    for key, x in part.items():
        out[key] = _scaled(upload[key], x, scale) if isinstance(x, dict) else x * scale
    return out
