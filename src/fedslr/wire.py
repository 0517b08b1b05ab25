"""What travels: trees of tensors as bytes, and the only place that counts them.

Every tensor takes the smallest of four lossless encodings:

    dense     all numbers
    factors   u and v of a low-rank matrix, where r(m + n) < mn
    bitmap    one bit per position, then the non-zeros
    indices   32- or 64-bit positions of the non-zeros, then the non-zeros

A message is a short frame around a safetensors body:

    magic "FSLR" · version · length of the body · CRC-32 of the body · body

The body describes itself: its entry `header` is JSON that lists, for every leaf of the tree, its path, encoding,
element type and shape. `decode` believes nothing: it answers anything but a well-formed, finite message of acceptable
size with a WireError.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedslr.errors import WireError
from fedslr.matrix import LowRank, matrix_shape
from fedslr.tree import Tree

MAGIC = b"FSLR"
VERSION = 1
FRAME = struct.Struct("<4sHQI")

MAX_BYTES = 2**33
MAX_NUMBERS = 2**28
MAX_DEPTH = 16
"""What a decoder accepts unless told otherwise: bytes of a message, numbers it unfolds to, depth of its tree."""

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

Array = np.ndarray[Any, Any]
Path = tuple[str, ...]


class Packed(NamedTuple):
    """A tree as named arrays, ready for safetensors, and how many model numbers they hold."""

    arrays: dict[str, Array]
    numbers: int


# --- which encoding -------------------------------------------------------------------------------------------------


def _index_bytes(size: int) -> int:
    return 4 if size < 2**31 else 8


def _bits(flat: Array) -> Array:
    """The bit patterns, so that a negative zero counts as a number and every encoding is exact."""
    return flat.view(f"u{flat.itemsize}")


def _choose(flat: Array) -> tuple[str, int]:
    """The smallest encoding of a dense array, and how many numbers it carries."""
    size, width = flat.size, flat.itemsize
    if size * width <= ENTRY:
        return "dense", size
    count = int(np.count_nonzero(_bits(flat)))
    costs = {
        "dense": size * width,
        "bitmap": (size + 7) // 8 + count * width + ENTRY,
        "indices": count * (width + _index_bytes(size)) + ENTRY,
    }
    kind = min(costs, key=lambda kind: costs[kind])
    return kind, size if kind == "dense" else count


def _settle(leaf: Any) -> Any:
    """A layer travels as factors only where they are smaller than the matrix, r(m + n) < mn; else multiplied out."""
    if isinstance(leaf, LowRank):
        width = leaf.u.element_size()
        if leaf.numbers * width + ENTRY >= prod(leaf.shape) * width:
            return leaf.dense()
    return leaf


# --- trees to arrays and back ---------------------------------------------------------------------------------------


def _name(path: Iterable[str]) -> str:
    """A path for a message to people: one short line, whatever a sender called it."""
    return ascii("/".join(path))[1:-1][:100]


def _leaves(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, leaf in tree.items():
        if isinstance(leaf, dict) and leaf:
            yield from _leaves(leaf, (*path, key))
        else:
            yield (*path, key), leaf


def _array(x: Tensor) -> Array:
    x = x.detach().cpu().contiguous()
    array: Array = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def _require_finite(x: Tensor, path: Path) -> None:
    # A sum meets every NaN and infinity, so a finite one clears the tensor; overflow alone needs the second look.
    if x.is_floating_point() and not isfinite(float(x.sum())) and not bool(torch.isfinite(x).all()):
        raise WireError(f"'{_name(path)}' has numbers that are not finite (NaN or infinity)")


def require_finite(tree: Tree) -> None:
    """A WireError that names the first tensor with NaN or infinity."""
    for path, leaf in _leaves(tree):
        for x in leaf[:2] if isinstance(leaf, LowRank) else [leaf]:
            if isinstance(x, Tensor):
                _require_finite(x, path)


def pack(tree: Tree) -> Packed:
    """A tree of tensors, factors and plain values as named arrays, each in its smallest encoding."""
    header: list[tuple[Path, str, str, Any]] = []
    arrays: dict[str, Array] = {}
    count = 0
    for path, leaf in _leaves(tree):
        entry = str(len(header))
        leaf = _settle(leaf)
        element = leaf.u.dtype if isinstance(leaf, LowRank) else getattr(leaf, "dtype", None)
        if element is not None and element not in NAMES:
            raise TypeError(f"'{_name(path)}' has elements of {element}, which do not travel")
        if isinstance(leaf, LowRank):
            for name, factor in (("u", leaf.u), ("v", leaf.v)):
                _require_finite(factor, path)
                arrays[f"{entry}.{name}"] = _array(factor)
            header.append((path, "factors", NAMES[leaf.u.dtype], leaf.shape))
            count += leaf.numbers
        elif isinstance(leaf, Tensor):
            _require_finite(leaf, path)
            kind, parts, carried = _fold(_array(leaf))
            arrays |= {entry + part: array for part, array in parts.items()}
            header.append((path, kind, NAMES[leaf.dtype], tuple(leaf.shape)))
            count += carried
        elif isinstance(leaf, dict):
            header.append((path, "empty", "", ()))
        elif isinstance(leaf, float) and not isfinite(leaf):
            raise WireError(f"'{_name(path)}' is not finite")
        elif leaf is None or isinstance(leaf, str | int | float | bool):
            header.append((path, "plain", "", leaf))
        else:
            raise TypeError(
                f"'{_name(path)}' is a {type(leaf).__name__}: only tensors, factors and plain values travel"
            )
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    arrays["header"] = np.frombuffer(text, np.uint8)
    return Packed(arrays, count)


def _fold(array: Array) -> tuple[str, dict[str, Array], int]:
    """The encoding of a dense array, its parts, and how many numbers they carry."""
    flat = array.reshape(-1)
    kind, count = _choose(flat)
    if kind == "dense":
        return kind, {"": array}, count
    nonzero = _bits(flat) != 0
    if kind == "bitmap":
        positions: Array = np.packbits(nonzero)
    else:
        positions = np.flatnonzero(nonzero).astype(np.int32 if _index_bytes(flat.size) == 4 else np.int64)
    return kind, {".values": flat[nonzero], f".{kind}": positions}, count


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
            raise WireError(f"'{_name(path)}' of shape {list(shape)} is larger than the {max_numbers} numbers allowed")
        parts = {"dense": ("",), "factors": (".u", ".v")}.get(kind, (".values", f".{kind}"))
        names = [str(index) + part for part in parts]
        if missing := [n for n in names if n not in arrays]:
            raise WireError(f"'{_name(path)}' lacks its data ({', '.join(missing)})")
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
            raise WireError(f"'{_name(path)}' is no plain value")
        if isinstance(shape, float) and not np.isfinite(shape):
            raise WireError(f"'{_name(path)}' is not finite")
        return tuple(path), kind, "", shape
    if kind == "empty":
        return tuple(path), kind, "", ()
    if kind not in ("dense", "factors", "bitmap", "indices"):
        raise WireError(f"'{_name(path)}' has an unknown encoding")
    if not (isinstance(dtype, str) and dtype in DTYPES):
        raise WireError(f"'{_name(path)}' has an unknown element type")
    sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**40 for n in shape)
    if not sizes or len(shape) > 16:
        raise WireError(f"'{_name(path)}' has a malformed shape")
    return tuple(path), kind, dtype, tuple(shape)


def _place(tree: Tree, path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise WireError(f"'{_name(path)}' lies inside a tensor")
    if path[-1] in tree:
        raise WireError(f"'{_name(path)}' comes twice")
    tree[path[-1]] = leaf


def _tensor(array: Array, dtype: torch.dtype, path: Path) -> Tensor:
    stored = torch.from_numpy(array)
    if stored.dtype == torch.int16 and dtype == torch.bfloat16:
        stored = stored.view(torch.bfloat16)
    if stored.dtype != dtype:
        raise WireError(f"'{_name(path)}' says {NAMES[dtype]} but carries {stored.dtype}".replace("torch.", ""))
    _require_finite(stored, path)
    return stored


def _unfold(path: Path, kind: str, dtype: str, shape: tuple[int, ...], arrays: list[Array]) -> Tensor | LowRank:
    x = _tensor(arrays[0], DTYPES[dtype], path)
    if kind == "dense":
        if tuple(x.shape) != shape:
            raise WireError(f"'{_name(path)}' says shape {list(shape)} but carries {list(x.shape)}")
        return x
    if kind == "factors":
        if not x.is_floating_point():
            raise WireError(f"'{_name(path)}' has factors of whole numbers")
        v = _tensor(arrays[1], DTYPES[dtype], path)
        fits = len(shape) >= 2 and x.ndim == 2 and v.ndim == 2 and x.shape[1] == v.shape[1]
        if not fits or (x.shape[0], v.shape[0]) != matrix_shape(shape):
            raise WireError(f"'{_name(path)}' has factors that do not fit its shape {list(shape)}")
        return LowRank(x, v, shape)
    positions = _read_positions(kind, arrays[1], prod(shape), path)
    if x.shape != positions.shape:
        raise WireError(f"'{_name(path)}' has {x.numel()} values for {positions.numel()} positions")
    out = torch.zeros(prod(shape), dtype=x.dtype)
    out[positions] = x
    return out.reshape(shape)


def _read_positions(kind: str, array: Array, size: int, path: Path) -> Tensor:
    where = f"'{_name(path)}' has"
    if array.ndim != 1:
        raise WireError(f"{where} malformed positions")
    if kind == "bitmap":
        if array.dtype != np.uint8 or array.size != (size + 7) // 8:
            raise WireError(f"{where} a bitmap of the wrong size")
        bits = np.unpackbits(array)
        if bits[size:].any():
            raise WireError(f"{where} positions outside its shape")
        return torch.from_numpy(np.flatnonzero(bits[:size]))
    if array.dtype != (np.int32 if _index_bytes(size) == 4 else np.int64):
        raise WireError(f"{where} positions of the wrong type")
    indices = array.astype(np.int64)
    if indices.size and (indices[0] < 0 or indices[-1] >= size or (np.diff(indices) <= 0).any()):
        raise WireError(f"{where} positions out of order or outside its shape")
    return torch.from_numpy(indices)


# --- messages -------------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """An encoded tree: its bytes are what is counted, its numbers what the paper's tables count."""

    data: bytes
    numbers: int


NOTHING = Message(b"", 0)
"""What a method sends that has nothing to say: no message at all."""


def seal(body: bytes) -> bytes:
    """Frame a body."""
    return FRAME.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body


def encode(tree: Tree) -> Message:
    """A tree as one message."""
    packed = pack(tree)
    return Message(seal(safetensors.numpy.save(packed.arrays)), packed.numbers)


def decode(
    data: bytes,
    *,
    device: torch.device | str = "cpu",
    max_bytes: int = MAX_BYTES,
    max_numbers: int = MAX_NUMBERS,
) -> Tree:
    """The tree of a message, or a WireError that says what is wrong with it."""
    if len(data) > max_bytes:
        raise WireError(f"the message has {len(data)} bytes, more than the {max_bytes} allowed")
    if len(data) < FRAME.size:
        raise WireError(f"the message is truncated: {len(data)} bytes")
    magic, version, length, checksum = FRAME.unpack_from(data)
    body = data[FRAME.size :]
    if magic != MAGIC:
        raise WireError("this is no fedslr message")
    if version != VERSION:
        raise WireError(f"the message has version {version}; this program reads version {VERSION}")
    if length != len(body):
        raise WireError(f"the message says {length} bytes but has {len(body)}: truncated or oversized")
    if zlib.crc32(body) != checksum:
        raise WireError("the message was damaged on its way: the checksum does not match")
    tree = unpack(load_arrays(body), max_numbers)
    return to_device(tree, device) if torch.device(device).type != "cpu" else tree


def load_arrays(body: bytes) -> dict[str, Array]:
    """The arrays of a safetensors body, or a WireError."""
    try:
        return safetensors.numpy.load(body)
    # Element types that numpy has no name for surface as KeyError, TypeError or ValueError.
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError("the message's body is malformed") from error


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Every tensor of a decoded tree on a device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, LowRank):
            return LowRank(leaf.u.to(device), leaf.v.to(device), leaf.shape)
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return {k: to_device(x, device) if isinstance(x, dict) else move(x) for k, x in tree.items()}


def unfold(tree: Tree) -> Tree:
    """Every factorised matrix multiplied out: what a client works with. The product is checked to be finite."""
    out: Tree = {}
    for key, leaf in tree.items():
        if isinstance(leaf, LowRank):
            out[key] = leaf.dense()
            _require_finite(out[key], (key,))
        else:
            out[key] = unfold(leaf) if isinstance(leaf, dict) else leaf
    return out
