"""The checks of an upload before it counts, and the bound on its norm.

The server scales an upload that is longer than the bound. Both sides book the scaled upload in full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedslr.channel import encoding, layout, measuring
from fedslr.core import factored, tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import WireError
from fedslr.core.tree import Tree
from fedslr.core.types import Payload
from fedslr.deploy.messages import Report, digest
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
        max_bytes: The most bytes of upload and address together; twice the payload if None.
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
    """Return a message's tree; raise a WireError unless it has the form of the tree `like`."""
    numbers = 4 * sum(max(x.numel(), 1) for x in tree.leaves(like))
    found = encoding.decode(data, max_bytes=max_bytes, max_numbers=numbers) if data else {}
    factored.require_alike(found, like, name)
    return factored.multiply_out(found)


def scale_within(algorithm: Algorithm[Any, Any, Any], upload: Payload, bound: float | None) -> float:
    """Return the factor, at most 1, that brings the bounded part of an upload to a norm of at most `bound`."""
    part = algorithm.clipped(upload)
    if bound is None or not tree.leaves(part):
        return 1.0
    norm = float(tree.norm(tree.map(Tensor.double, part)))
    return bound / norm if norm > bound else 1.0


def scaled(algorithm: Algorithm[Any, Any, Any], upload: Payload, scale: float) -> Payload:
    """Return an upload with its bounded part multiplied by a factor; server and node get the same bits."""

    def multiply(whole: Payload, part: Payload) -> Payload:
        made = {k: multiply(whole[k], x) if isinstance(x, dict) else x * scale for k, x in part.items()}
        return whole | made

    return upload if scale == 1 else multiply(upload, algorithm.clipped(upload))
