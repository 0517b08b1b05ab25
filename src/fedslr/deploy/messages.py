"""The messages between the server and the nodes: plain fields around bytes that the channel encoded.

The counted uploads of a client form a chain. Both sides keep its head:

    head ← SHA-256(head, round, attempt, digest of the upload, scale that the norm bound gave it)

Every order contains the server's head for the node. If it equals the node's own head, the server counted no upload
since. If it follows from the upload that the node keeps, the server counted that upload, and the node books it. Any
other head means that the two sides disagree: the server enrols the node again and sends it the right ledger.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, get_type_hints

from fedslr.channel import encoding
from fedslr.core import factored, schema
from fedslr.core.errors import WireError
from fedslr.core.tree import Tree

ENROL, TRAIN, EVALUATE = "enrol", "train", "evaluate"
DONE, LOST, REFUSED = "done", "lost", "refused"
UNKNOWN_CLIENT = -1
"""The client number in an order to a node whose client is not known yet."""
EIGHT_BIT, NUMBERS = "8-bit", "numbers"
"""The kinds of inputs: 8-bit values, which are scaled to the range from 0 to 1, or numbers, which are not scaled."""
MAX_TEXT_LENGTH = 2000
"""The most characters of a text in a message."""
MAX_QUOTE_LENGTH = 300
"""The most characters that are shown of a text from the other side."""


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def quoted(text: str) -> str:
    """Return a text from the other side as one short line of printable ASCII characters."""
    return ascii(" ".join(text[:MAX_TEXT_LENGTH].split()))[1:-1][:MAX_QUOTE_LENGTH]


def encode(tree: Tree) -> encoding.Message:
    """Return a tree as a message; an empty tree gives a message without bytes."""
    return encoding.encode(tree) if tree else encoding.NOTHING


def decode_parts(data: bytes) -> Tree:
    """Return the tree of a message, with low-rank matrices as factors if they were sent as factors."""
    return encoding.decode(data) if data else {}


def decode(data: bytes) -> Tree:
    """Return the tree of a message, with every matrix multiplied out."""
    return factored.multiply_out(decode_parts(data))


def first_head(run: str, client: int) -> str:
    """Return the head of a client before its first counted upload."""
    return digest(f"{run} {client}".encode())


def next_head(head: str, round: int, attempt: int, upload: str, scale: float) -> str:
    """Return the head after an upload, given by its digest, was counted with a scale."""
    return digest(f"{head} {round} {attempt} {upload} {scale!r}".encode())


@dataclass(frozen=True)
class _Fields:
    """A message as plain fields: whole numbers, finite numbers, texts and bytes."""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """Return the message with these fields; raise a WireError if one is missing, unknown or of another type."""
        if wrong := next(_mistakes(given, get_type_hints(cls)), None):
            raise WireError(f"the message {wrong}")
        return cls(**given)


def _mistakes(given: Mapping[str, Any], kinds: Mapping[str, type]) -> Iterator[str]:
    """Yield every mistake in the fields of a message."""
    yield from (f"lacks '{name}'" for name in kinds if name not in given)
    yield from (f"has an unknown field: {ascii(name)[:50]}" for name in given if name not in kinds)
    for name, value in given.items():
        if type(value) is not kinds[name]:
            yield f"has a {type(value).__name__} as '{name}', expected {schema.KINDS.get(kinds[name], 'bytes')}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"has a '{name}' that is not a finite number"


@dataclass(frozen=True)
class Order(_Fields):
    """A message from the server to a node."""

    kind: str
    run: str
    client: int
    round: int
    """Counted from 0: the round to train in, or the number of rounds that are done."""
    attempt: int
    head: str
    """The head of the client's chain."""
    scale: float
    """The factor by which the norm bound multiplied the last counted upload."""
    payload: bytes = b""
    shared: bytes = b""
    """In an order to evaluate: the global model, if the payload holds only parts of it."""
    note: str = ""
    """The reason if the server refused the node's last message."""
    recipe: str = ""
    """In an order to enrol: the complete recipe as TOML."""
    start: bytes = b""
    """In an order to enrol: the initial model."""
    ledger: bytes = b""
    """In an order to enrol: the client's ledger."""


@dataclass(frozen=True)
class Report(_Fields):
    """A message from a node to the server."""

    kind: str
    status: str
    run: str
    client: int
    round: int
    attempt: int
    examples: int = 0
    inputs: str = ""
    """In a report of an enrolment: the kind of the node's inputs."""
    payload: bytes = b""
    digest: str = ""
    """SHA-256 of the payload."""
    address: bytes = b""
    """The address after the training or, in a report of an enrolment, the address of the node's present state."""
    scores: str = ""
    """In a report of an evaluation: the scores of the global and of the personal model, see `scores`."""
    parameters: int = 0
    """The number of parameters that the personal model stores."""
    reason: str = ""
    """The reason of a status other than DONE."""
