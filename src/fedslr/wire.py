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

A message need not be made to know its size: `measure` is exact and reads of each tensor only how many of its numbers
are not zero, so that nothing but those counts leaves the device; `nonzeros` and `sizes` do it for a whole cohort.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes: bit patterns, to which a negative zero is not zero."""

ENDINGS = ("", ".u", ".v", ".values", ".bitmap", ".indices")
"""How the names of a leaf's arrays may end."""

Array = np.ndarray[Any, Any]
Bytes = bytes | memoryview
Path = tuple[str, ...]
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


class Packed(NamedTuple):
    """A tree as named arrays, ready for safetensors, how many model numbers they hold, and what each array is."""

    arrays: dict[str, Array]
    numbers: int
    parts: dict[str, Part]

    def pieces(self) -> list[Bytes]:
        """The body that safetensors makes of the arrays, byte for byte, in pieces that copy none of them."""
        index, names = _layout(self.parts)
        return [index, *(_bytes(self.arrays[name]) for name in names)]


# --- which encoding -------------------------------------------------------------------------------------------------


def _index_bytes(size: int) -> int:
    return 4 if size < 2**31 else 8


def _bits(flat: Array) -> Array:
    """The bit patterns, so that a negative zero counts as a number and every encoding is exact."""
    return flat.view(f"u{flat.itemsize}")


def _choose(size: int, width: int, count: int) -> str:
    """The smallest encoding of so many elements of so many bytes, `count` of them not zero."""
    if size * width <= ENTRY:
        return "dense"
    costs = {
        "dense": size * width,
        "bitmap": (size + 7) // 8 + count * width + ENTRY,
        "indices": count * (width + _index_bytes(size)) + ENTRY,
    }
    return min(costs, key=lambda kind: costs[kind])


def _plan(path: Path, leaf: Any, count: int = 0) -> Plan:
    """How a settled leaf travels; of a tensor, it matters how many of its elements are not zero."""
    if isinstance(leaf, LowRank):
        parts = {".u": Part(leaf.u.dtype, tuple(leaf.u.shape)), ".v": Part(leaf.v.dtype, tuple(leaf.v.shape))}
        return Plan((path, "factors", NAMES[leaf.u.dtype], leaf.shape), parts, leaf.numbers)
    if isinstance(leaf, Tensor):
        shape, size = tuple(leaf.shape), leaf.numel()
        kind = _choose(size, leaf.element_size(), count)
        line = (path, kind, NAMES[leaf.dtype], shape)
        if kind == "dense":
            return Plan(line, {"": Part(leaf.dtype, shape)}, size)
        if kind == "bitmap":
            positions = Part(torch.uint8, ((size + 7) // 8,))
        else:
            positions = Part(torch.int32 if _index_bytes(size) == 4 else torch.int64, (count,))
        return Plan(line, {".values": Part(leaf.dtype, (count,)), f".{kind}": positions}, count)
    if isinstance(leaf, dict):
        return Plan((path, "empty", "", ()), {}, 0)
    return Plan((path, "plain", "", leaf), {}, 0)


def as_factors(leaf: LowRank) -> bool:
    """Whether a layer travels as factors: only where they are fewer numbers than the matrix, r(m + n) < mn.

    What counts as a model's size counts them so too, and must not depend on where a model has been.
    """
    return leaf.numbers < prod(leaf.shape)


def _settle(leaf: Any) -> Any:
    """Factors that are no smaller than their matrix are multiplied out."""
    return leaf.dense() if isinstance(leaf, LowRank) and not as_factors(leaf) else leaf


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


def _bytes(array: Array) -> memoryview:
    """What an array is made of, lowest byte first; no copy where the machine has it so."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data


def _require_finite(x: Tensor, path: Path) -> None:
    # A sum meets every NaN and infinity, so a finite one clears the tensor; overflow alone needs the second look.
    if x.is_floating_point() and not isfinite(float(x.detach().sum())) and not bool(torch.isfinite(x).all()):
        raise WireError(f"'{_name(path)}' has numbers that are not finite (NaN or infinity)")


def require_alike(found: Tree, like: Tree, where: str) -> None:
    """A WireError unless two trees have the same keys, and tensors of the same shapes and types."""
    for key in [*like, *(key for key in found if key not in like)]:
        path = f"{where}/{ascii(key)[1:-1][:50]}"
        if key not in found:
            raise WireError(f"'{path}' is missing")
        if key not in like:
            raise WireError(f"'{path}' is not part of it")
        a, b = found[key], like[key]
        if isinstance(b, dict):
            if not isinstance(a, dict):
                raise WireError(f"'{path}' is a tensor, expected a table")
            require_alike(a, b, path)
        elif not isinstance(a, Tensor | LowRank):
            raise WireError(f"'{path}' is no tensor")
        else:
            kind = a.u.dtype if isinstance(a, LowRank) else a.dtype
            if tuple(a.shape) != tuple(b.shape) or kind != b.dtype:
                got, expected = (
                    f"{list(s)} of {str(k).removeprefix('torch.')}" for s, k in ((a.shape, kind), (b.shape, b.dtype))
                )
                raise WireError(f"'{path}' is {got}, expected {expected}")


def require_finite(tree: Tree) -> None:
    """A WireError that names the first tensor with NaN or infinity."""
    for path, leaf in _leaves(tree):
        for x in leaf[:2] if isinstance(leaf, LowRank) else [leaf]:
            if isinstance(x, Tensor):
                _require_finite(x, path)


def _settled(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """The leaves as they travel: tensors, factors, plain values, empty dictionaries; a TypeError for anything else."""
    for path, leaf in _leaves(tree):
        for x in leaf[:2] if isinstance(leaf, LowRank) else [leaf]:
            element = getattr(x, "dtype", None)
            if element is not None and element not in NAMES:
                raise TypeError(f"'{_name(path)}' has elements of {element}, which do not travel")
        if isinstance(leaf, float) and not isfinite(leaf):
            raise WireError(f"'{_name(path)}' is not finite")
        if not (leaf is None or isinstance(leaf, Tensor | LowRank | dict | str | int | float | bool)):
            raise TypeError(
                f"'{_name(path)}' is a {type(leaf).__name__}: only tensors, factors and plain values travel"
            )
        yield path, _settle(leaf)


def _describe(plans: Sequence[Plan]) -> tuple[bytes, dict[str, Part]]:
    """The header of leaves that travel as planned, and all arrays of their body, the header among them."""
    header = json.dumps([plan.line for plan in plans], separators=(",", ":"), allow_nan=False).encode()
    parts = {f"{i}{ending}": part for i, plan in enumerate(plans) for ending, part in plan.parts.items()}
    return header, {**parts, "header": Part(torch.uint8, (len(header),))}


def pack(tree: Tree) -> Packed:
    """A tree of tensors, factors and plain values as named arrays, each in its smallest encoding."""
    plans: list[Plan] = []
    arrays: dict[str, Array] = {}
    for path, leaf in _settled(tree):
        parts: dict[str, Array] = {}
        if isinstance(leaf, LowRank):
            for name, factor in ((".u", leaf.u), (".v", leaf.v)):
                _require_finite(factor, path)
                parts[name] = _array(factor)
            plan = _plan(path, leaf)
        elif isinstance(leaf, Tensor):
            _require_finite(leaf, path)
            array = _array(leaf)
            nonzero = _bits(array.reshape(-1)) != 0
            plan = _plan(path, leaf, int(np.count_nonzero(nonzero)))
            parts = _fold(array, nonzero, plan.line[1])
        else:
            plan = _plan(path, leaf)
        arrays |= {f"{len(plans)}{part}": array for part, array in parts.items()}
        plans.append(plan)
    header, described = _describe(plans)
    arrays["header"] = np.frombuffer(header, np.uint8)
    return Packed(arrays, sum(plan.numbers for plan in plans), described)


def _fold(array: Array, nonzero: Array, kind: str) -> dict[str, Array]:
    """The parts of a dense array in an encoding, given which of its elements are not zero."""
    if kind == "dense":
        return {"": array}
    if kind == "bitmap":
        positions: Array = np.packbits(nonzero)
    else:
        positions = np.flatnonzero(nonzero).astype(np.int32 if _index_bytes(array.size) == 4 else np.int64)
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

    @property
    def size(self) -> Size:
        return Size(len(self.data), self.numbers)


NOTHING = Message(b"", 0)
"""What a method sends that has nothing to say: no message at all."""


def seal(body: bytes) -> bytes:
    """Frame a body."""
    return FRAME.pack(MAGIC, VERSION, len(body), zlib.crc32(body)) + body


def encode(tree: Tree) -> Message:
    """A tree as one message."""
    packed = pack(tree)
    return Message(seal(b"".join(packed.pieces())), packed.numbers)


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


def each_tensor(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """A tree with every tensor, those of factors too, replaced by what a function makes of it."""

    def made(leaf: Any) -> Any:
        if isinstance(leaf, LowRank):
            return LowRank(fn(leaf.u), fn(leaf.v), leaf.shape)
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return {k: each_tensor(fn, x) if isinstance(x, dict) else made(x) for k, x in tree.items()}


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Every tensor of a decoded tree on a device."""
    return each_tensor(lambda x: x.to(device), tree)


def compact(tree: Tree) -> Tree:
    """Factors only where they are smaller than the matrix: how a tree comes back from the wire or the disk."""
    return {k: compact(x) if isinstance(x, dict) else _settle(x) for k, x in tree.items()}


def to_host(tree: Tree) -> Tree:
    """A tree in the host's memory, compact. Factors are multiplied where they were: another device rounds otherwise."""
    return to_device(compact(tree), "cpu")


def unfold(tree: Tree, check: bool = True) -> Tree:
    """Every factorised matrix multiplied out: what a client works with. The product is checked to be finite.

    Whoever looks at all of it at once does without the check, which waits for a GPU matrix by matrix.
    """
    out: Tree = {}
    for key, leaf in tree.items():
        if isinstance(leaf, LowRank):
            out[key] = leaf.dense()
            if check:
                _require_finite(out[key], (key,))
        else:
            out[key] = unfold(leaf, check) if isinstance(leaf, dict) else leaf
    return out


def settled(tree: Tree) -> Tree:
    """A tree with factors only where they travel as such, so that who looks at it next need not multiply them again."""
    return {key: settled(leaf) if isinstance(leaf, dict) else _settle(leaf) for key, leaf in tree.items()}


# --- sizes of messages that are never made --------------------------------------------------------------------------


def measure(tree: Tree) -> Size:
    """`encode(tree).size`, without the message: one number per tensor leaves the device, all in one transfer.

    Whether the tensors are finite is not looked at.
    """
    leaves = list(_settled(tree))
    return _size(leaves, _count([x[None] for _, x in leaves if isinstance(x, Tensor)])[0].tolist())


def nonzeros(tree: Tree, stacked: bool) -> Tensor:
    """How many elements of each tensor are not zero as bit patterns, in the order of the leaves, on their device.

    Of a stacked tree, whose tensors have the clients as their first axis: (clients, tensors); else (tensors,). Nothing
    waits for the device. Factors are counted as the tensor they travel as, if they do not travel as factors.
    """
    if stacked:
        return _count([leaf for _, leaf in _stacked(tree) if isinstance(leaf, Tensor)])
    return _count([leaf[None] for _, leaf in _settled(tree) if isinstance(leaf, Tensor)])[0]


def sizes(tree: Tree, counts: Array | Tensor) -> list[Size]:
    """What `measure` says of every client's part of a stacked tree, from its `nonzeros` once they are on the host."""
    rows: list[list[int]] = counts.tolist()
    if not rows:
        return []
    leaves = [(path, leaf[0] if isinstance(leaf, Tensor) else leaf) for path, leaf in _stacked(tree)]
    found = {row: _size(leaves, row) for row in {tuple(row) for row in rows}}
    return [found[tuple(row)] for row in rows]


def _stacked(tree: Tree) -> list[tuple[Path, Any]]:
    """The leaves of a tree whose tensors have the clients as their first axis; a ValueError for any other."""
    if any(isinstance(leaf, LowRank) for _, leaf in _leaves(tree)):
        raise ValueError("factors cannot be stacked: clients differ in rank; measure each client's tree by itself")
    leaves = list(_settled(tree))
    first = {tuple(leaf.shape[:1]) for _, leaf in leaves if isinstance(leaf, Tensor)}
    if len(first) != 1 or first == {()}:
        raise ValueError("a stacked tree has tensors, all with the clients as their first axis")
    return leaves


def _count(tensors: Sequence[Tensor]) -> Tensor:
    """(clients, tensors): the bit patterns that are not zero in each client's part of each tensor."""
    if not tensors:
        return torch.zeros(1, 0, dtype=torch.int64)
    counts = []
    for x in tensors:
        # A view keeps whatever strides there are; a last axis of 1 gives even a scalar per client one to sum over.
        patterns = x.detach().view(PATTERNS[x.element_size()]).unsqueeze(-1)
        counts.append((patterns != 0).sum(dim=tuple(range(1, patterns.ndim))))
    # A tree may keep a counter or two on the CPU; they go to where the model is, which waits for nothing.
    device = next((c.device for c in counts if c.device.type != "cpu"), counts[0].device)
    return torch.stack([c.to(device, non_blocking=True) for c in counts], dim=1)


def _size(leaves: Iterable[tuple[Path, Any]], counts: Iterable[int]) -> Size:
    """The size of a message with these settled leaves, given the non-zeros of each tensor among them, in order."""
    left = iter(counts)
    plans = [_plan(path, leaf, next(left) if isinstance(leaf, Tensor) else 0) for path, leaf in leaves]
    _, parts = _describe(plans)
    return Size(FRAME.size + _body_bytes(parts), sum(plan.numbers for plan in plans))


def _body_bytes(parts: Mapping[str, Part]) -> int:
    """The length of what safetensors makes of such arrays."""
    return len(_layout(parts)[0]) + sum(part.bytes for part in parts.values())


def _layout(parts: Mapping[str, Part]) -> tuple[bytes, list[str]]:
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
