"""Layers for export: a low-rank weight as two thin layers, a sparse one as a sparse product.

With π(W) = u vᵀ (see `matrix.py`), W[o, i, a, b] = Σ_r u[o·d₁ + a, r] v[i·d₂ + b, r]. A convolution with W is therefore
exactly one with the kernel 1×d₂ from i to r channels, followed by one with the kernel d₁×1 from r to o channels: each
takes the stride, padding and dilation of its own axis. A linear layer is two linear layers.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

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
        rank = max(1, weight.rank)
        like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        biased = layer.bias is not None
        if isinstance(layer, nn.Linear):
            self.first: PlainLayer = nn.Linear(layer.in_features, rank, bias=False, **like)
            self.second: PlainLayer = nn.Linear(rank, layer.out_features, bias=biased, **like)
        else:
            self.first, self.second = _thin_convolutions(layer, rank, biased, like)
        self._fill(layer, weight)

    def _fill(self, layer: PlainLayer, weight: LowRank) -> None:
        first, second = weight.v.mT, weight.u
        if weight.rank == 0:
            first, second = first.new_zeros(1, first.shape[1]), second.new_zeros(len(second), 1)
        if len(self.shape) == 4:
            outputs, inputs, height, width = self.shape
            first = first.reshape(-1, inputs, 1, width)
            second = second.reshape(outputs, height, -1).mT.unsqueeze(-1)
        with torch.no_grad():
            self.first.weight.copy_(first)
            self.second.weight.copy_(second)
            if self.second.bias is not None and layer.bias is not None:
                self.second.bias.copy_(layer.bias)

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


def _thin_convolutions(layer: nn.Conv2d, rank: int, biased: bool, like: dict[str, Any]) -> tuple[nn.Conv2d, nn.Conv2d]:
    def pad(axis: int) -> str | tuple[int, ...]:
        """Return the padding of one axis and none of the other."""
        given = layer.padding
        return given if isinstance(given, str) else tuple(n if i == axis else 0 for i, n in enumerate(given))

    def only(values: tuple[int, ...], axis: int) -> tuple[int, int]:
        return (values[0], 1) if axis == 0 else (1, values[1])

    def thin(inputs: int, outputs: int, axis: int, bias: bool) -> nn.Conv2d:
        return nn.Conv2d(
            inputs,
            outputs,
            only(layer.kernel_size, axis),
            only(layer.stride, axis),
            pad(axis),  # type: ignore[arg-type]
            only(layer.dilation, axis),
            bias=bias,
            padding_mode=layer.padding_mode,
            **like,
        )

    return thin(layer.in_channels, rank, 1, False), thin(rank, layer.out_channels, 0, biased)


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
        """Return whether a layer pads with equally many zeros on both sides, as `unfold` does."""
        return isinstance(layer, nn.Linear) or (layer.padding_mode == "zeros" and not isinstance(layer.padding, str))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if self.linear:
            return out + (self.part @ x.flatten(0, -2).mT).mT.reshape(out.shape)
        windows = F.unfold(x, self.kernel, **self.window)  # type: ignore[arg-type]
        sums = self.part @ windows.transpose(0, 1).flatten(1)
        return out + sums.reshape(out.shape[1], len(x), *out.shape[2:]).transpose(0, 1)


class RecomposedLayer(nn.Module):
    """A layer that stores its weight in parts and puts it together for every batch: small on disk, and slower.

    onnxruntime multiplies the factors of an ONNX file once, when it loads the file.
    """

    def __init__(self, layer: PlainLayer, low: LowRank | None, rest: Tensor | None) -> None:
        super().__init__()
        self.shape = tuple(layer.weight.shape)
        # In a list, so that this module does not store the dense weight.
        self.plain = [layer]
        self.bias = layer.bias
        # Archives of torch.export cannot hold empty tensors, such as factors of rank 0.
        given = low if low is not None and low.rank else None
        self.register_buffer("u", None if given is None else given.u)
        self.register_buffer("v", None if given is None else given.v)
        flat = None if rest is None else rest.detach().flatten()
        self.register_buffer("positions", None if flat is None else flat.nonzero().flatten().int())
        self.register_buffer("values", None if flat is None else flat[flat != 0])
        self.u: Tensor | None
        self.v: Tensor | None
        self.positions: Tensor | None
        self.values: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The dense weight."""
        parts = []
        if self.u is not None and self.v is not None:
            parts.append(from_matrix(self.u @ self.v.mT, self.shape))
        if self.positions is not None and self.values is not None:
            nothing = torch.zeros(prod(self.shape), dtype=self.values.dtype, device=self.values.device)
            parts.append(nothing.scatter(0, self.positions.long(), self.values).reshape(self.shape))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.plain
        if isinstance(layer, nn.Linear):
            return F.linear(x, self.weight, self.bias)
        out: Tensor = layer._conv_forward(x, self.weight, self.bias)
        return out
