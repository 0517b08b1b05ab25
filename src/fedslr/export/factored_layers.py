"""Layers for export: a low-rank weight as two thin layers, a sparse one as a sparse product.

With π(W) = u vᵀ (see `matrix.py`), W[o, i, a, b] = Σ_r u[o·d₁ + a, r] v[i·d₂ + b, r]. A convolution with W is therefore
exactly one with the kernel 1×d₂ from i to r channels, followed by one with the kernel d₁×1 from r to o channels: each
takes the stride, padding and dilation of its own axis. A linear layer is two linear layers.
"""

from __future__ import annotations

import warnings
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedslr.core.matrix import LowRank, from_matrix

PlainLayer = nn.Conv2d | nn.Linear
"""Layers that can take another form. Grouped convolutions and other kinds of layers stay as they are."""


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer can take another form; a subclass may use its weights differently, so it cannot."""
    return type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)


class FactoredLayer(nn.Module):
    """A layer whose weight is given as factors: two thin layers in sequence."""

    def __init__(self, layer: PlainLayer, weight: LowRank) -> None:
        super().__init__()
        self.shape = weight.shape
        u, v, rank = weight.u, weight.v, weight.rank
        if rank == 0:
            u, v, rank = u.new_zeros(len(u), 1), v.new_zeros(len(v), 1), 1
        first, second = v.mT, u
        if isinstance(layer, nn.Linear):
            self.first: PlainLayer = nn.Linear(layer.in_features, rank, bias=False, device="meta")
            self.second: PlainLayer = nn.Linear(rank, layer.out_features, bias=False, device="meta")
        else:
            outputs, inputs, height, width = weight.shape
            self.first = _thin_convolution(layer, inputs, rank, axis=1)
            self.second = _thin_convolution(layer, rank, outputs, axis=0)
            first = first.reshape(rank, inputs, 1, width)
            second = second.reshape(outputs, height, rank).mT.unsqueeze(-1)
        self.first.weight = nn.Parameter(first.contiguous())
        self.second.weight = nn.Parameter(second.contiguous())
        self.second.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The dense weight, because some modules read the weights of their layers."""
        u, v = self.second.weight, self.first.weight
        if len(self.shape) == 4:
            u, v = u.squeeze(-1).mT.flatten(0, 1), v.flatten(1)
        return from_matrix(u @ v, self.shape)

    @property
    def bias(self) -> Tensor | None:
        return self.second.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def _thin_convolution(layer: nn.Conv2d, inputs: int, outputs: int, axis: int) -> nn.Conv2d:
    """Return the part of a convolution along one axis, without its weights."""

    def along(values: tuple[int, ...], other: int) -> tuple[int, int]:
        return (values[0], other) if axis == 0 else (other, values[1])

    return nn.Conv2d(
        inputs,
        outputs,
        along(layer.kernel_size, 1),
        along(layer.stride, 1),
        layer.padding if isinstance(layer.padding, str) else along(layer.padding, 0),
        along(layer.dilation, 1),
        bias=False,
        padding_mode=layer.padding_mode,
        device="meta",
    )


class SparseAddition(nn.Module):
    """A layer plus a sparse part S of its weight as a separate product: y = base(x) + S x."""

    def __init__(self, base: nn.Module, layer: PlainLayer, part: Tensor) -> None:
        super().__init__()
        self.base = base
        self.linear = isinstance(layer, nn.Linear)
        if isinstance(layer, nn.Conv2d):
            self.kernel = layer.kernel_size
            self.window = {"dilation": layer.dilation, "padding": layer.padding, "stride": layer.stride}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            self.register_buffer("part", part.detach().flatten(1).to_sparse_csr(), persistent=False)
        self.part: Tensor

    @staticmethod
    def takes(layer: PlainLayer) -> bool:
        """Return whether a layer pads both sides with the same number of zeros, as `unfold` does."""
        return isinstance(layer, nn.Linear) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.linear:
            return out + (self.part @ x.flatten(0, -2).mT).mT.reshape(out.shape)
        windows = F.unfold(x, self.kernel, **self.window)  # type: ignore[arg-type]
        sums = self.part @ windows.transpose(0, 1).flatten(1)
        return out + sums.reshape(out.shape[1], len(x), *out.shape[2:]).transpose(0, 1)


class RecomposedLayer(nn.Module):
    """A layer that stores its weight in parts and computes it from them for every batch: small on disk, and slower.

    onnxruntime multiplies the factors of an ONNX file once, when it loads the file.
    """

    def __init__(self, layer: PlainLayer, low: LowRank | None, rest: Tensor | None) -> None:
        super().__init__()
        self.shape = tuple(layer.weight.shape)
        # In a list, so that this module does not store the dense weight.
        self.plain = [layer]
        self.bias = layer.bias
        # Archives of torch.export cannot hold empty tensors, such as factors of rank 0.
        self.has_factors, self.has_rest = low is not None and low.rank > 0, rest is not None
        if low is not None and self.has_factors:
            self.register_buffer("u", low.u)
            self.register_buffer("v", low.v)
        if rest is not None:
            flat = rest.detach().flatten()
            self.register_buffer("positions", flat.nonzero().flatten().int())
            self.register_buffer("values", flat[flat != 0])
        self.u: Tensor
        self.v: Tensor
        self.positions: Tensor
        self.values: Tensor

    @property
    def weight(self) -> Tensor:
        """The dense weight."""
        parts = [from_matrix(self.u @ self.v.mT, self.shape)] if self.has_factors else []
        if self.has_rest:
            zeros = torch.zeros(prod(self.shape), dtype=self.values.dtype, device=self.values.device)
            parts.append(zeros.scatter(0, self.positions.long(), self.values).reshape(self.shape))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.plain
        if isinstance(layer, nn.Linear):
            return F.linear(x, self.weight, self.bias)
        out: Tensor = layer._conv_forward(x, self.weight, self.bias)
        return out
