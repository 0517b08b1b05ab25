"""The layers of a model as the sum of a low-rank part and a rest, as the method that trained it keeps them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedslr.channel import measuring
from fedslr.core import factored
from fedslr.core.matrix import LowRank, dense, to_matrix
from fedslr.core.types import Params, Payload

MAX_SPARSE_DENSITY = 0.2
"""A part with a larger share of non-zeros is not tried as a sparse product."""


@dataclass(frozen=True)
class Layer:
    """One parameter: whole = low + rest, either of which may be None."""

    whole: Tensor
    low: LowRank | None = None
    rest: Tensor | None = None

    @cached_property
    def factors(self) -> LowRank | None:
        """The whole as factors, if they hold fewer numbers than the matrix: r(m + n) < mn; else None.

        A rest with few non-zero rows or columns is low-rank too.
        """
        if self.low is None:
            return None
        both = self.low if self.rest is None else _joined(self.low, slender(self.rest))
        return both if both.numbers < self.whole.numel() else None

    @property
    def is_sparse(self) -> bool:
        """Whether there is a sparse rest."""
        return self.rest is not None and int(torch.count_nonzero(self.rest)) <= MAX_SPARSE_DENSITY * self.rest.numel()

    def bytes_by_form(self) -> dict[str, int]:
        """Return the bytes that a program stores in each form; the rest of `recomposed` has 32-bit positions."""
        width = self.whole.element_size()
        rest = 0 if self.rest is None else int(torch.count_nonzero(self.rest)) * (width + 4)
        low = 0 if self.low is None else self.low.numbers * width
        found = {} if self.factors is None else {"factors": self.factors.numbers * width}
        parts = {"recomposed": low + rest} if low + rest else {}
        return {**found, "dense": self.whole.numel() * width, **parts}

    def stored(self, form: str) -> dict[str, Tensor | LowRank]:
        """Return the tensors that a file stores: the parts of the form, or for a dense one the fewest bytes."""
        if self.low is None:
            return {"": self.whole}
        parts: dict[str, Tensor | LowRank] = {"": self.low}
        if self.rest is not None:
            parts["added"] = self.rest
        if form != "dense":
            return parts
        return min(parts, {"": self.whole}, key=lambda kept: measuring.measure(kept).bytes)


def slender(x: Tensor) -> LowRank:
    """Return a tensor as exact factors: the non-zero rows or columns of its matrix, and their positions."""
    matrix = to_matrix(x)
    rows, columns = (matrix.any(axis).nonzero().flatten() for axis in (1, 0))
    if len(columns) <= len(rows):
        return LowRank(matrix[:, columns], _positions(columns, matrix.shape[1], matrix), tuple(x.shape))
    return LowRank(_positions(rows, matrix.shape[0], matrix), matrix[rows].mT, tuple(x.shape))


def _positions(chosen: Tensor, size: int, like: Tensor) -> Tensor:
    """Return the chosen columns of the identity."""
    out = like.new_zeros(size, len(chosen))
    out[chosen, torch.arange(len(chosen), device=chosen.device)] = 1
    return out


def _joined(a: LowRank, b: LowRank) -> LowRank:
    """Return a + b."""
    return LowRank(torch.cat([a.u, b.u], 1), torch.cat([a.v, b.v], 1), a.shape)


def composed(kept: Payload, model: Params) -> dict[str, Layer]:
    """Return every layer of a model as the sum of the parts that a method keeps, if they add up to it.

    They do for `w + p`. A mixture, or a model that was adapted on the client's data, is taken in full.
    """
    trees = list(kept.values()) if all(isinstance(x, dict) for x in kept.values()) else [kept]
    return {name: _layer(x, [tree[name] for tree in trees if name in tree]) for name, x in model.items()}


def _layer(whole: Tensor, terms: list[Tensor | LowRank]) -> Layer:
    whole = whole.detach().cpu()
    parts = [factored.to_device({"": term}, "cpu")[""] for term in terms]
    total = sum(dense(dict(enumerate(parts))).values(), torch.zeros_like(whole))  # type: ignore[arg-type]
    if not torch.allclose(total, whole, rtol=1e-5, atol=1e-7 * float(whole.abs().max()) if whole.numel() else 0.0):
        return Layer(whole, rest=whole)
    low = [part for part in parts if isinstance(part, LowRank)]
    rest = sum((part for part in parts if isinstance(part, Tensor)), torch.zeros_like(whole))
    left = rest if bool(rest.any()) else None
    if not low:
        return Layer(whole, rest=left)
    one = functools.reduce(_joined, low)
    return Layer(whole, one, left) if factored.factors_are_smaller(one) else Layer(whole, rest=whole)


def stored_parts(layers: Mapping[str, Layer], forms: Mapping[str, str]) -> dict[str, dict[str, Tensor | LowRank]]:
    """Return what a file stores of all layers: each layer or its low-rank part, and the parts added to that."""
    stored = {name: layer.stored(forms.get(name, "dense")) for name, layer in layers.items()}
    return {
        "model": {name: kept[""] for name, kept in stored.items()},
        "added": {name: kept["added"] for name, kept in stored.items() if "added" in kept},
    }
