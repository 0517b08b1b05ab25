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
from fedslr.core.matrix import LowRank

FRAME = struct.Struct("<4sHQI")


ENTRY = 96
"""An upper bound on what one more entry costs in the body's index: an encoding must win by more than that."""


DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


NAMES = {dtype: name for name, dtype in DTYPES.items()}


STORED = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls an element as we store it (numpy has no bfloat16), in the order in which it lays them out."""


ENDINGS = ("", ".u", ".v", ".values", ".bitmap", ".indices")
"""How the names of a leaf's arrays may end."""


Array = np.ndarray[Any, Any]


Line = tuple[Path, str, str, Any]


class Size(NamedTuple):
    """What a message costs: its bytes, and its numbers, which the paper's tables count."""

    bytes: int
    numbers: int


class Part(NamedTuple):
    """One array of a body, without its contents."""

    element: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.element.itemsize


class Plan(NamedTuple):
    """How a leaf travels: its line of the header, its arrays by the ending of their names, the numbers they carry."""

    line: Line
    parts: dict[str, Part]
    numbers: int


def index_bytes(size: int) -> int:
    return 4 if size < 2**31 else 8


def choose_encoding(size: int, width: int, count: int) -> str:
    """The smallest encoding of so many elements of so many bytes, `count` of them not zero."""
    if size * width <= ENTRY:
        return "dense"
    costs = {
        "dense": size * width,
        "bitmap": (size + 7) // 8 + count * width + ENTRY,
        "indices": count * (width + index_bytes(size)) + ENTRY,
    }
    return min(costs, key=lambda kind: costs[kind])


def plan_leaf(path: Path, leaf: Any, count: int = 0) -> Plan:
    """How a settled leaf travels; of a tensor, it matters how many of its elements are not zero."""
    if isinstance(leaf, LowRank):
        parts = {".u": Part(leaf.u.dtype, tuple(leaf.u.shape)), ".v": Part(leaf.v.dtype, tuple(leaf.v.shape))}
        return Plan((path, "factors", NAMES[leaf.u.dtype], leaf.shape), parts, leaf.numbers)
    if isinstance(leaf, Tensor):
        shape, size = tuple(leaf.shape), leaf.numel()
        kind = choose_encoding(size, leaf.element_size(), count)
        line = (path, kind, NAMES[leaf.dtype], shape)
        if kind == "dense":
            return Plan(line, {"": Part(leaf.dtype, shape)}, size)
        if kind == "bitmap":
            positions = Part(torch.uint8, ((size + 7) // 8,))
        else:
            positions = Part(torch.int32 if index_bytes(size) == 4 else torch.int64, (count,))
        return Plan(line, {".values": Part(leaf.dtype, (count,)), f".{kind}": positions}, count)
    if isinstance(leaf, dict):
        return Plan((path, "empty", "", ()), {}, 0)
    return Plan((path, "plain", "", leaf), {}, 0)


def describe(plans: Sequence[Plan]) -> tuple[bytes, dict[str, Part]]:
    """The header of leaves that travel as planned, and all arrays of their body, the header among them."""
    header = json.dumps([plan.line for plan in plans], separators=(",", ":"), allow_nan=False).encode()
    parts = {f"{i}{ending}": part for i, plan in enumerate(plans) for ending, part in plan.parts.items()}
    return header, {**parts, "header": Part(torch.uint8, (len(header),))}


def safetensors_layout(parts: Mapping[str, Part]) -> tuple[bytes, list[str]]:
    """What safetensors writes before such arrays, and the order in which they follow.

    Eight bytes of length, the index as JSON padded to a multiple of eight, then the arrays, ordered by element type and
    name. The index says where each array lies, so that the order decides how many digits it has.
    """
    rank = {element: place for place, element in enumerate(STORED)}
    index: dict[str, Any] = {}
    at = 0
    for name, part in sorted(parts.items(), key=lambda item: (rank[item[1].element], item[0])):
        end = at + part.bytes
        index[name] = {"dtype": STORED[part.element], "shape": part.shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(index, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, list(index)
