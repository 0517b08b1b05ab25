"""Convert trees to named arrays for safetensors, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedslr.channel.layout import (
    ARRAY_SUFFIXES,
    ELEMENT_NAMES,
    ELEMENT_TYPES,
    Array,
    ArraySpec,
    HeaderLine,
    LeafPlan,
    array_specs,
    describe_body,
    index_type,
    plan_leaf,
    safetensors_layout,
)
from fedslr.core.durable import Bytes
from fedslr.core.errors import WireError
from fedslr.core.factored import (
    Path,
    leaves_with_paths,
    path_name,
    require_finite_tensor,
    smaller_form,
    tensors_of,
)
from fedslr.core.matrix import LowRank
from fedslr.core.tree import Tree

MAX_NUMBERS = 2**28
"""The most values that a message may decode to by default."""
NO_LIMIT = 2**62
"""The `max_numbers` for bytes that come from a trusted source."""
MAX_DEPTH = 16
"""The most keys in a path."""
MAX_AXES = 16
MAX_SIDE = 2**40


class Packed(NamedTuple):
    """A tree as named arrays for safetensors, how many numbers they hold, and the type and shape of each array."""

    arrays: dict[str, Array]
    numbers: int
    specs: dict[str, ArraySpec]

    def pieces(self) -> list[Bytes]:
        """Return the body that safetensors would write, in pieces that share the memory of the arrays."""
        index, names = safetensors_layout(self.specs)
        return [index, *(self.arrays[name].reshape(-1).view(np.uint8).data for name in names)]


def to_array(x: Tensor) -> Array:
    """Return a tensor as a numpy array; bfloat16 becomes int16."""
    x = x.detach().cpu().contiguous()
    array: Array = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def is_plain_value(value: Any) -> bool:
    """Return whether a value can be part of a header: None, a string, a boolean or a finite number."""
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))


def leaves_to_send(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a tree in their smaller form: tensors, factors, plain values, empty dictionaries."""
    for path, leaf in leaves_with_paths(tree):
        parts = tensors_of(leaf)
        if not (parts or isinstance(leaf, dict) or is_plain_value(leaf)) or any(
            x.dtype not in ELEMENT_NAMES for x in parts
        ):
            kind = f"tensor of {parts[0].dtype}" if parts else type(leaf).__name__
            raise WireError(
                f"'{path_name(path)}' is a {kind}, which cannot be sent; expected real tensors, strings, booleans or "
                "finite numbers"
            )
        yield path, smaller_form(leaf)


def pack(tree: Tree) -> Packed:
    """Return a tree of tensors, factors and plain values as named arrays, each in its smallest encoding."""
    plans: list[LeafPlan] = []
    arrays: dict[str, Array] = {}
    for path, leaf in leaves_to_send(tree):
        for x in tensors_of(leaf):
            require_finite_tensor(x, path)
        plan, parts = _encode(path, leaf)
        arrays |= {f"{len(plans)}{ending}": part for ending, part in zip(plan.arrays, parts, strict=True)}
        plans.append(plan)
    header, specs = describe_body(plans)
    arrays["header"] = np.frombuffer(header, np.uint8)
    return Packed(arrays, sum(plan.numbers for plan in plans), specs)


def _encode(path: Path, leaf: Any) -> tuple[LeafPlan, list[Array]]:
    """Return the encoding of a leaf and its arrays."""
    if not isinstance(leaf, Tensor):
        return plan_leaf(path, leaf), [to_array(x) for x in tensors_of(leaf)]
    array = to_array(leaf)
    # Comparing bit patterns keeps −0.0, so that every encoding is lossless.
    flat = array.reshape(-1)
    nonzero = flat.view(f"u{flat.itemsize}") != 0
    plan = plan_leaf(path, leaf, int(np.count_nonzero(nonzero)))
    kind = plan.line[1]
    if kind == "dense":
        return plan, [array]
    if kind == "bitmap":
        return plan, [flat[nonzero], np.packbits(nonzero)]
    positions = np.flatnonzero(nonzero)
    return plan, [flat[nonzero], positions.astype(np.int32 if index_type(array.size) == torch.int32 else np.int64)]


def unpack(arrays: dict[str, Array], max_numbers: int = MAX_NUMBERS) -> Tree:
    """Return the tree that `pack` encoded. Verify every claim of the header, because the sender may be hostile."""
    tree: Tree = {}
    lines = _header(arrays)
    described = {f"{i}{ending}" for i, line in enumerate(lines) for ending in ARRAY_SUFFIXES.get(line[1], ())}
    if wrong := arrays.keys() ^ {*described, "header"}:
        names = path_name([", ".join(sorted(wrong)[:3])])
        raise WireError(f"the message's arrays and its header do not match ({names})")
    left = max_numbers
    for i, (path, kind, element, shape) in enumerate(lines):
        if kind not in ARRAY_SUFFIXES:
            _place(tree, path, shape if kind == "plain" else {})
            continue
        # Count a side of zero as one: torch cannot hold a shape whose other sides are huge.
        left -= prod(max(n, 1) for n in shape)
        if left < 0:
            raise WireError(
                f"'{path_name(path)}' of shape {list(shape)} is larger than the {max_numbers} numbers allowed"
            )
        parts = [arrays[f"{i}{ending}"] for ending in ARRAY_SUFFIXES[kind]]
        _place(tree, path, _decode(path, kind, ELEMENT_TYPES[element], shape, parts))
    return tree


def _header(arrays: dict[str, Array]) -> list[HeaderLine]:
    """Return the lines of the header."""
    try:
        lines = json.loads(arrays["header"].tobytes())
        well_formed = isinstance(lines, list) and all(_is_header_line(line) for line in lines)
    except (KeyError, ValueError, RecursionError):
        well_formed = False
    if not well_formed:
        raise WireError("the message's header is missing or malformed")
    return [
        (tuple(path), kind, element, tuple(shape) if kind in ARRAY_SUFFIXES else shape)
        for path, kind, element, shape in lines
    ]


def _is_header_line(line: Any) -> bool:
    """Return whether a header line has the form [path, encoding, element type, shape or plain value]."""
    if not (isinstance(line, list) and len(line) == 4):
        return False
    path, kind, element, shape = line
    if not (isinstance(path, list) and 0 < len(path) <= MAX_DEPTH and all(isinstance(key, str) for key in path)):
        return False
    if kind == "plain":
        return is_plain_value(shape)
    if kind == "empty":
        return True
    if not (kind in list(ARRAY_SUFFIXES) and element in list(ELEMENT_TYPES) and isinstance(shape, list)):
        return False
    can_be_factors = len(shape) >= 2 and ELEMENT_TYPES[element].is_floating_point
    if len(shape) > MAX_AXES or (kind == "factors" and not can_be_factors):
        return False
    return all(type(n) is int and 0 <= n < MAX_SIDE for n in shape)


def _place(tree: Tree, path: Path, leaf: Any) -> None:
    """Insert a decoded leaf into the tree."""
    *outer, name = path
    for key in outer:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree
    if not isinstance(tree, dict) or name in tree:
        raise WireError(f"'{path_name(path)}' comes twice, or lies inside a tensor")
    tree[name] = leaf


def _decode(path: Path, kind: str, element: torch.dtype, shape: tuple[int, ...], arrays: list[Array]) -> Any:
    """Return the tensor or factors that arrays encode; raise a WireError unless they are as the header says."""
    # numpy has no bfloat16, so int16 always stands for bfloat16.
    parts = [x.view(torch.bfloat16) if x.dtype == torch.int16 else x for x in map(torch.from_numpy, arrays)]
    found = [ArraySpec(x.dtype, tuple(x.shape)) for x in parts]
    expected = array_specs(kind, element, shape, count=parts[0].shape[-1] if parts[0].ndim else 0).values()
    for got, wanted in zip(found, expected, strict=True):
        if got != wanted:
            raise WireError(f"'{path_name(path)}' carries {got}, expected {wanted}")
    for x in parts:
        require_finite_tensor(x, path)
    if kind == "dense":
        return parts[0]
    if kind == "factors":
        return LowRank(parts[0], parts[1], shape)
    positions = np.flatnonzero(np.unpackbits(arrays[1])) if kind == "bitmap" else arrays[1].astype(np.int64)
    return _fill(path, parts[0], positions, shape)


def _fill(path: Path, values: Tensor, positions: Array, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of zeros with the given values; positions must increase and lie inside the shape."""
    size = prod(shape)
    rising = len(positions) == 0 or bool(positions[0] >= 0 and positions[-1] < size and (np.diff(positions) > 0).all())
    if not rising or len(positions) != len(values):
        raise WireError(f"'{path_name(path)}' has positions out of order, outside its shape, or without values")
    out = torch.zeros(size, dtype=values.dtype)
    out[torch.from_numpy(positions)] = values
    return out.reshape(shape)
