"""The layout of a message body: the encoding of every leaf and its arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedslr.core.factored import Path
from fedslr.core.matrix import LowRank, matrix_shape

FRAME_HEADER = struct.Struct("<4sHQI")
"""Magic, version, length and CRC-32 of the body."""

MAX_INDEX_ENTRY = 96
"""The most bytes that one more array adds to the body's index. A sparse encoding must save more than that."""

SAFETENSORS_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that safetensors gives to the types of tensors that can be sent, in the order of the arrays of a file.

bfloat16 is stored as int16, because numpy has no bfloat16.
"""

ELEMENT_NAMES = {element: str(element).removeprefix("torch.") for element in SAFETENSORS_NAMES}
"""The names of the types in a header."""

ELEMENT_TYPES = {name: element for element, name in ELEMENT_NAMES.items()}

ARRAY_SUFFIXES = {
    "dense": ("",),
    "factors": (".u", ".v"),
    "bitmap": (".values", ".bitmap"),
    "indices": (".values", ".indices"),
}
"""The suffixes of the names of a tensor's arrays, by encoding."""

Array = np.ndarray[Any, Any]

HeaderLine = tuple[Path, str, str, Any]
"""A leaf in the header: its path, encoding, element type and shape. Plain values are stored in place of the shape."""


class Size(NamedTuple):
    """The cost of a message: its bytes, and how many numbers it holds, which the paper's tables count."""

    bytes: int
    numbers: int


class ArraySpec(NamedTuple):
    """The type and shape of an array in a body."""

    element: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.element.itemsize

    def __str__(self) -> str:
        return f"{ELEMENT_NAMES.get(self.element, self.element)} {list(self.shape)}"


class LeafPlan(NamedTuple):
    """The encoding of a leaf: its header line, its arrays by suffix, and how many numbers the arrays hold."""

    line: HeaderLine
    arrays: dict[str, ArraySpec]
    numbers: int


def index_type(size: int) -> torch.dtype:
    """Return the integer type for positions in a tensor of `size` elements."""
    return torch.int32 if size < 2**31 else torch.int64


def choose_encoding(size: int, width: int, count: int) -> str:
    """Return the smallest encoding of a tensor.

    Args:
        size: The number of elements.
        width: The bytes per element.
        count: The number of non-zero elements.
    """
    if size * width <= MAX_INDEX_ENTRY:
        return "dense"
    costs = {
        "dense": size * width,
        "bitmap": (size + 7) // 8 + count * width + MAX_INDEX_ENTRY,
        "indices": count * (width + index_type(size).itemsize) + MAX_INDEX_ENTRY,
    }
    return min(costs, key=lambda kind: costs[kind])


def array_specs(kind: str, element: torch.dtype, shape: tuple[int, ...], count: int) -> dict[str, ArraySpec]:
    """Return the specifications of an encoded tensor's arrays by suffix.

    `count` is the rank of factors, or the number of non-zero elements in a sparse encoding.
    """
    size = prod(shape)
    if kind == "dense":
        specs = [ArraySpec(element, shape)]
    elif kind == "factors":
        specs = [ArraySpec(element, (side, count)) for side in matrix_shape(shape)]
    elif kind == "bitmap":
        specs = [ArraySpec(element, (count,)), ArraySpec(torch.uint8, ((size + 7) // 8,))]
    else:
        specs = [ArraySpec(element, (count,)), ArraySpec(index_type(size), (count,))]
    return dict(zip(ARRAY_SUFFIXES[kind], specs, strict=True))


def plan_leaf(path: Path, leaf: Any, nonzeros: int = 0) -> LeafPlan:
    """Return the encoding of a leaf; `nonzeros` is the number of non-zero elements of a tensor."""
    if isinstance(leaf, dict):
        return LeafPlan((path, "empty", "", ()), {}, 0)
    if not isinstance(leaf, Tensor | LowRank):
        return LeafPlan((path, "plain", "", leaf), {}, 0)
    shape = tuple(leaf.shape)
    if isinstance(leaf, LowRank):
        kind, element, count, numbers = "factors", leaf.u.dtype, leaf.rank, leaf.numbers
    else:
        kind, element, count = choose_encoding(leaf.numel(), leaf.element_size(), nonzeros), leaf.dtype, nonzeros
        numbers = leaf.numel() if kind == "dense" else nonzeros
    line = (path, kind, ELEMENT_NAMES[element], shape)
    return LeafPlan(line, array_specs(kind, element, shape, count), numbers)


def describe_body(plans: Sequence[LeafPlan]) -> tuple[bytes, dict[str, ArraySpec]]:
    """Return the header of planned leaves, and the specifications of all arrays in their body, including the header."""
    header = json.dumps([plan.line for plan in plans], separators=(",", ":"), allow_nan=False).encode()
    arrays = {f"{i}{ending}": spec for i, plan in enumerate(plans) for ending, spec in plan.arrays.items()}
    return header, {**arrays, "header": ArraySpec(torch.uint8, (len(header),))}


def safetensors_layout(arrays: Mapping[str, ArraySpec]) -> tuple[bytes, list[str]]:
    """Return the bytes that safetensors writes before the arrays, and the order of the arrays.

    A file has eight bytes for the length of the index, the index as JSON padded to a multiple of eight bytes, then the
    arrays ordered by element type and name. The index holds the offsets of the arrays, so its length depends on their
    order.
    """
    rank = {element: place for place, element in enumerate(SAFETENSORS_NAMES)}
    index: dict[str, Any] = {}
    at = 0
    for name, spec in sorted(arrays.items(), key=lambda item: (rank[item[1].element], item[0])):
        end = at + spec.bytes
        index[name] = {"dtype": SAFETENSORS_NAMES[spec.element], "shape": spec.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, list(index)
