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

import zlib
from typing import NamedTuple

import safetensors.numpy
import torch
from safetensors import SafetensorError

from fedslr.channel.layout import FRAME, Array, Size
from fedslr.channel.packing import MAX_NUMBERS, pack, unpack
from fedslr.core.errors import WireError
from fedslr.core.factored import to_device
from fedslr.core.tree import Tree

MAGIC = b"FSLR"


VERSION = 1


MAX_BYTES = 2**33


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
