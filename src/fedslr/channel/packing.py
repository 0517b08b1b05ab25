"""Trees to named arrays and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedslr.channel.layout import DTYPES, NAMES, Array, Part, Plan, describe, index_bytes, plan_leaf, safetensors_layout
from fedslr.core.durable import Bytes
from fedslr.core.errors import WireError
from fedslr.core.factored import Path, leaves_with_paths, path_name, require_finite_tensor, settle
from fedslr.core.matrix import LowRank, matrix_shape
from fedslr.core.tree import Tree

MAX_NUMBERS = 2**28


MAX_DEPTH = 16
"""What a decoder accepts unless told otherwise: bytes of a message, numbers it unfolds to, depth of its tree."""


class Packed(NamedTuple):
    """A tree as named arrays, ready for safetensors, how many model numbers they hold, and what each array is."""

    arrays: dict[str, Array]
    numbers: int
    parts: dict[str, Part]

    def pieces(self) -> list[Bytes]:
        """The body that safetensors makes of the arrays, byte for byte, in pieces that copy none of them."""
        index, names = safetensors_layout(self.parts)
        return [index, *(little_endian_bytes(self.arrays[name]) for name in names)]


def _bits(flat: Array) -> Array:
    """The bit patterns, so that a negative zero counts as a number and every encoding is exact."""
    return flat.view(f"u{flat.itemsize}")


def to_array(x: Tensor) -> Array:
    x = x.detach().cpu().contiguous()
    array: Array = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def little_endian_bytes(array: Array) -> memoryview:
    """What an array is made of, lowest byte first; no copy where the machine has it so."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data


def settled_leaves(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """The leaves as they travel: tensors, factors, plain values, empty dictionaries; a TypeError for anything else."""
    for path, leaf in leaves_with_paths(tree):
        for x in leaf[:2] if isinstance(leaf, LowRank) else [leaf]:
            element = getattr(x, "dtype", None)
            if element is not None and element not in NAMES:
                raise TypeError(f"'{path_name(path)}' has elements of {element}, which do not travel")
        if isinstance(leaf, float) and not isfinite(leaf):
            raise WireError(f"'{path_name(path)}' is not finite")
        if not (leaf is None or isinstance(leaf, Tensor | LowRank | dict | str | int | float | bool)):
            raise TypeError(
                f"'{path_name(path)}' is a {type(leaf).__name__}: only tensors, factors and plain values travel"
            )
        yield path, settle(leaf)


def pack(tree: Tree) -> Packed:
    """A tree of tensors, factors and plain values as named arrays, each in its smallest encoding."""
    plans: list[Plan] = []
    arrays: dict[str, Array] = {}
    for path, leaf in settled_leaves(tree):
        parts: dict[str, Array] = {}
        if isinstance(leaf, LowRank):
            for name, factor in ((".u", leaf.u), (".v", leaf.v)):
                require_finite_tensor(factor, path)
                parts[name] = to_array(factor)
            plan = plan_leaf(path, leaf)
        elif isinstance(leaf, Tensor):
            require_finite_tensor(leaf, path)
            array = to_array(leaf)
            nonzero = _bits(array.reshape(-1)) != 0
            plan = plan_leaf(path, leaf, int(np.count_nonzero(nonzero)))
            parts = _fold(array, nonzero, plan.line[1])
        else:
            plan = plan_leaf(path, leaf)
        arrays |= {f"{len(plans)}{part}": array for part, array in parts.items()}
        plans.append(plan)
    header, described = describe(plans)
    arrays["header"] = np.frombuffer(header, np.uint8)
    return Packed(arrays, sum(plan.numbers for plan in plans), described)


def _fold(array: Array, nonzero: Array, kind: str) -> dict[str, Array]:
    """The parts of a dense array in an encoding, given which of its elements are not zero."""
    if kind == "dense":
        return {"": array}
    if kind == "bitmap":
        positions: Array = np.packbits(nonzero)
    else:
        positions = np.flatnonzero(nonzero).astype(np.int32 if index_bytes(array.size) == 4 else np.int64)
    return {".values": array.reshape(-1)[nonzero], f".{kind}": positions}


def unpack(arrays: dict[str, Array], max_numbers: int = MAX_NUMBERS) -> Tree:
    """The tree of `pack`, every claim of the header verified."""
    tree: Tree = {}
    used = {"header"}
    left = max_numbers
    for index, entry in enumerate(_header(arrays)):
        path, kind, dtype, shape = _entry(entry)
        if kind == "plain":
            _place(tree, path, shape)
            continue
        if kind == "empty":
            _place(tree, path, {})
            continue
        # A size of zero must not hide the others: torch cannot hold such a shape either.
        left -= prod(max(n, 1) for n in shape)
        if left < 0:
            raise WireError(
                f"'{path_name(path)}' of shape {list(shape)} is larger than the {max_numbers} numbers allowed"
            )
        parts = {"dense": ("",), "factors": (".u", ".v")}.get(kind, (".values", f".{kind}"))
        names = [str(index) + part for part in parts]
        if missing := [n for n in names if n not in arrays]:
            raise WireError(f"'{path_name(path)}' lacks its data ({', '.join(missing)})")
        used.update(names)
        leaf = _unfold(path, kind, dtype, shape, [arrays[n] for n in names])
        _place(tree, path, leaf)
    if extra := set(arrays) - used:
        raise WireError(f"the message carries data nobody described: {', '.join(sorted(extra)[:3])}")
    return tree


def _header(arrays: dict[str, Array]) -> list[Any]:
    text = arrays.get("header")
    if text is None or text.dtype != np.uint8 or text.ndim != 1:
        raise WireError("the message has no header")
    try:
        header = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise WireError("the message's header is not JSON") from error
    if not isinstance(header, list):
        raise WireError("the message's header is not a list")
    return header


def _entry(entry: Any) -> tuple[Path, str, str, Any]:
    """One line of the header: path, encoding, element type, shape (or the value itself)."""
    if not (isinstance(entry, list) and len(entry) == 4):
        raise WireError("a line of the message's header is malformed")
    path, kind, dtype, shape = entry
    if not (isinstance(path, list) and 0 < len(path) <= MAX_DEPTH and all(isinstance(p, str) for p in path)):
        raise WireError("a path in the message's header is malformed")
    if kind == "plain":
        if not (shape is None or isinstance(shape, str | int | float | bool)):
            raise WireError(f"'{path_name(path)}' is no plain value")
        if isinstance(shape, float) and not np.isfinite(shape):
            raise WireError(f"'{path_name(path)}' is not finite")
        return tuple(path), kind, "", shape
    if kind == "empty":
        return tuple(path), kind, "", ()
    if kind not in ("dense", "factors", "bitmap", "indices"):
        raise WireError(f"'{path_name(path)}' has an unknown encoding")
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise WireError(f"'{path_name(path)}' has an unknown element type")
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**40 for n in shape)
    if not sizes or len(shape) > 16:
        raise WireError(f"'{path_name(path)}' has a malformed shape")
    return tuple(path), kind, dtype, tuple(shape)


def _place(tree: Tree, path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise WireError(f"'{path_name(path)}' lies inside a tensor")
    if path[-1] in tree:
        raise WireError(f"'{path_name(path)}' comes twice")
    tree[path[-1]] = leaf


def _tensor(array: Array, dtype: torch.dtype, path: Path) -> Tensor:
    stored = torch.from_numpy(array)
    if stored.dtype == torch.int16 and dtype == torch.bfloat16:
        stored = stored.view(torch.bfloat16)
    if stored.dtype != dtype:
        raise WireError(f"'{path_name(path)}' says {NAMES[dtype]} but carries {stored.dtype}".replace("torch.", ""))
    require_finite_tensor(stored, path)
    return stored


def _unfold(path: Path, kind: str, dtype: str, shape: tuple[int, ...], arrays: list[Array]) -> Tensor | LowRank:
    x = _tensor(arrays[0], DTYPES[dtype], path)
    if kind == "dense":
        if tuple(x.shape) != shape:
            raise WireError(f"'{path_name(path)}' says shape {list(shape)} but carries {list(x.shape)}")
        return x
    if kind == "factors":
        if not x.is_floating_point():
            raise WireError(f"'{path_name(path)}' has factors of whole numbers")
        v = _tensor(arrays[1], DTYPES[dtype], path)
        fits = len(shape) >= 2 and x.ndim == 2 and v.ndim == 2 and x.shape[1] == v.shape[1]
        if not fits or (x.shape[0], v.shape[0]) != matrix_shape(shape):
            raise WireError(f"'{path_name(path)}' has factors that do not fit its shape {list(shape)}")
        return LowRank(x, v, shape)
    positions = _read_positions(kind, arrays[1], prod(shape), path)
    if x.shape != positions.shape:
        raise WireError(f"'{path_name(path)}' has {x.numel()} values for {positions.numel()} positions")
    out = torch.zeros(prod(shape), dtype=x.dtype)
    out[positions] = x
    return out.reshape(shape)


def _read_positions(kind: str, array: Array, size: int, path: Path) -> Tensor:
    where = f"'{path_name(path)}' has"
    if array.ndim != 1:
        raise WireError(f"{where} malformed positions")
    if kind == "bitmap":
        if array.dtype != np.uint8 or array.size != (size + 7) // 8:
            raise WireError(f"{where} a bitmap of the wrong size")
        bits = np.unpackbits(array)
        if bits[size:].any():
            raise WireError(f"{where} positions outside its shape")
        return torch.from_numpy(np.flatnonzero(bits[:size]))
    if array.dtype != (np.int32 if index_bytes(size) == 4 else np.int64):
        raise WireError(f"{where} positions of the wrong type")
    indices = array.astype(np.int64)
    if indices.size and (indices[0] < 0 or indices[-1] >= size or (np.diff(indices) <= 0).any()):
        raise WireError(f"{where} positions out of order or outside its shape")
    return torch.from_numpy(indices)
