"""Encode trees of tensors as messages, and decode messages. Only this room counts bytes.

Every tensor takes the smallest of four lossless encodings:

    dense     all values
    factors   u and v of a low-rank matrix, if r(m + n) < mn
    bitmap    one bit per position, then the non-zeros
    indices   32- or 64-bit positions of the non-zeros, then the non-zeros

A message is a short frame around a safetensors body:

    magic "FSLR" · version · length of the body · CRC-32 of the body · body

The body describes itself. Its entry `header` is JSON that lists the path, encoding, element type and shape of every
leaf of the tree. `decode` trusts nothing: it raises a WireError unless the message is well-formed, finite and within
the limits. `measuring` computes the exact size of a message without encoding it.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import safetensors.numpy
from safetensors import SafetensorError

from fedslr.channel.layout import FRAME_HEADER, Array, Size
from fedslr.channel.packing import MAX_NUMBERS, pack, unpack
from fedslr.core.errors import WireError
from fedslr.core.tree import Tree

MAGIC = b"FSLR"
VERSION = 1
MAX_BYTES = 2**33
"""The largest message in bytes that `decode` accepts by default."""


class Message(NamedTuple):
    """An encoded tree: its bytes, and how many numbers it holds, which the paper's tables count."""

    data: bytes
    numbers: int

    @property
    def size(self) -> Size:
        return Size(len(self.data), self.numbers)


NOTHING = Message(b"", 0)
"""The absence of a message, if a method has nothing to send."""


def frame_header(body: bytes) -> bytes:
    """Return the bytes that precede a body."""
    return FRAME_HEADER.pack(MAGIC, VERSION, len(body), zlib.crc32(body))


def seal(body: bytes) -> bytes:
    """Return the message with this body."""
    return frame_header(body) + body


def encode(tree: Tree) -> Message:
    """Return a tree as one message."""
    packed = pack(tree)
    return Message(seal(b"".join(packed.pieces())), packed.numbers)


def decode(data: bytes, *, max_bytes: int = MAX_BYTES, max_numbers: int = MAX_NUMBERS) -> Tree:
    """Return the tree of a message, with tensors on the CPU.

    Args:
        data: The bytes as they arrived. They may be hostile.
        max_bytes: The largest accepted message in bytes.
        max_numbers: The most values that all decoded tensors may have together.

    Raises:
        WireError: The message is malformed, has values that are not finite, or exceeds a limit.
    """
    if len(data) > max_bytes:
        raise WireError(f"the message has {len(data)} bytes, more than the {max_bytes} allowed")
    start, body = data[: FRAME_HEADER.size], data[FRAME_HEADER.size :]
    expected = frame_header(body)
    same_format = len(MAGIC) + 2
    if start[:same_format] != expected[:same_format]:
        raise WireError(f"this is no message of version {VERSION}; use the same version of fedslr on both sides")
    if start != expected:
        raise WireError("the message was truncated or damaged: its length or checksum does not match")
    return unpack(load_arrays(body), max_numbers)


def load_arrays(body: bytes) -> dict[str, Array]:
    """Return the arrays of a safetensors body; raise a WireError if the body is malformed."""
    try:
        return safetensors.numpy.load(body)
    # Element types that numpy does not know raise KeyError, TypeError or ValueError.
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError("the message's body is malformed") from error
