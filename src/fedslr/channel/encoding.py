"""Messages: trees of tensors as bytes, and the only place that counts them.

Every tensor takes the smallest of four lossless encodings:

    dense     all numbers
    factors   u and v of a low-rank matrix, where r(m + n) < mn
    bitmap    one bit per position, then the non-zeros
    indices   32- or 64-bit positions of the non-zeros, then the non-zeros

A message is a short frame around a safetensors body:

    magic "FSLR" · version · length of the body · CRC-32 of the body · body

The body describes itself: its entry `header` is JSON that lists, for every leaf of the tree, its path, encoding,
element type and shape. `decode` trusts nothing: it raises a WireError for anything but a well-formed, finite message of
acceptable size. `measuring` computes the exact size of a message without encoding it.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import safetensors.numpy
import torch
from safetensors import SafetensorError

from fedslr.channel.layout import FRAME_HEADER, Array, Size
from fedslr.channel.packing import MAX_NUMBERS, pack, unpack
from fedslr.core.errors import WireError
from fedslr.core.factored import to_device
from fedslr.core.tree import Tree

MAGIC = b"FSLR"
VERSION = 1
MAX_BYTES = 2**33
"""The largest message that `decode` accepts unless told otherwise."""


class Message(NamedTuple):
    """An encoded tree: its bytes, and the numbers in it, which the paper's tables count."""

    data: bytes
    numbers: int

    @property
    def size(self) -> Size:
        return Size(len(self.data), self.numbers)


NOTHING = Message(b"", 0)
"""No message at all, from a method that has nothing to send."""


def frame_header(body: bytes) -> bytes:
    """Return the bytes before a body."""
    return FRAME_HEADER.pack(MAGIC, VERSION, len(body), zlib.crc32(body))


def seal(body: bytes) -> bytes:
    """Return the message of a body."""
    return frame_header(body) + body


def encode(tree: Tree) -> Message:
    """Return a tree as one message."""
    packed = pack(tree)
    return Message(seal(b"".join(packed.pieces())), packed.numbers)


def decode(
    data: bytes,
    *,
    device: torch.device | str = "cpu",
    max_bytes: int = MAX_BYTES,
    max_numbers: int = MAX_NUMBERS,
) -> Tree:
    """Return the tree of a message; refuse anything but a well-formed, finite message within the limits.

    Args:
        data: The bytes as they arrived; they may be hostile.
        device: The device of the tensors.
        max_bytes: The most bytes of the message.
        max_numbers: The most numbers of all decoded tensors together.

    Raises:
        WireError: The message is not acceptable; the error says why.
    """
    if len(data) > max_bytes:
        raise WireError(f"the message has {len(data)} bytes, more than the {max_bytes} allowed")
    start, body = data[: FRAME_HEADER.size], data[FRAME_HEADER.size :]
    expected = frame_header(body)
    same_format = len(MAGIC) + 2
    if start[:same_format] != expected[:same_format]:
        raise WireError(f"this is no fedslr message of version {VERSION}")
    if start != expected:
        raise WireError("the message was truncated or damaged: its length or checksum does not match")
    tree = unpack(load_arrays(body), max_numbers)
    return to_device(tree, device) if torch.device(device).type != "cpu" else tree


def load_arrays(body: bytes) -> dict[str, Array]:
    """Return the arrays of a safetensors body; refuse a malformed one."""
    try:
        return safetensors.numpy.load(body)
    # Element types that numpy has no name for surface as KeyError, TypeError or ValueError.
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError("the message's body is malformed") from error
