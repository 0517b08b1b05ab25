"""The checks of an upload before it counts."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedslr.channel import encoding, layout, measuring
from fedslr.core import factored, tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import WireError
from fedslr.core.tree import Tree
from fedslr.core.types import Payload
from fedslr.deploy.messages import Report, digest
from fedslr.deploy.norm_bound import scale_within, scaled
from fedslr.storage.client_store import size


class Upload(NamedTuple):
    """An upload that will count."""

    tree: Payload
    """The upload after the norm bound."""
    address: Payload
    digest: str
    scale: float
    """The factor by which the norm bound multiplied the upload."""
    size: layout.Size


def examine(
    report: Report,
    algorithm: Algorithm[Any, Any, Any],
    payload: Payload,
    address: Payload,
    max_bytes: int | None,
    norm_bound: float | None,
) -> Upload:
    """Return the upload of a report; raise a WireError if it cannot count.

    Args:
        report: The report of a client that trained.
        algorithm: The method.
        payload: A tree of the form of the client's payload, which its upload must have too.
        address: A tree of the form of its address.
        max_bytes: The most bytes of upload and address; twice the payload unless given.
        norm_bound: The norm that a longer upload is scaled to.
    """
    max_bytes = usual_bytes(payload) if max_bytes is None else max_bytes
    length = len(report.payload) + len(report.address)
    if length > max_bytes:
        raise WireError(f"it has {length} bytes, more than the {max_bytes} allowed")
    if digest(report.payload) != report.digest:
        raise WireError("its digest does not match")
    upload = decode_alike("upload", report.payload, payload, max_bytes)
    numbers = measuring.measure(upload).numbers if upload else 0
    scale = scale_within(algorithm, upload, norm_bound)
    return Upload(
        scaled(algorithm, upload, scale),
        decode_alike("address", report.address, address, max_bytes),
        report.digest,
        scale,
        layout.Size(len(report.payload), numbers),
    )


def usual_bytes(like: Tree) -> int:
    """Return a limit for messages of the form of a tree: twice its size, and some bytes for names."""
    return 2 * size(like) + 2**16


def decode_alike(name: str, data: bytes, like: Tree, max_bytes: int) -> Tree:
    """Return a message's tree; raise a WireError unless it has the form of another tree."""
    numbers = 4 * sum(max(x.numel(), 1) for x in tree.leaves(like))
    found = encoding.decode(data, max_bytes=max_bytes, max_numbers=numbers) if data else {}
    factored.require_alike(found, like, name)
    return factored.multiply_out(found)
