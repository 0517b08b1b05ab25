"""What server and nodes say to each other: a few plain fields around bytes that `wire` made.

The uploads of a client that were counted form a chain. Both sides keep its head:

    head ← SHA-256(head, round, attempt, digest of the upload, share of it that was counted)

Every order tells the node the server's head. One that is the node's own: nothing was counted since. One that the upload
the node keeps leads to: that upload was counted, and is booked. Any other: the two have lost each other, and the node
is enrolled anew with what its books must say.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, get_type_hints

from fedslr.core import schema
from fedslr.core.errors import WireError

ENROL, TRAIN, EVALUATE = "enrol", "train", "evaluate"
DONE, LOST, REFUSED = "done", "lost", "refused"
ANYBODY = -1
"""The client of an order to a node that has not yet said which client it is."""
UNKNOWN = -1.0
"""An accuracy that there is not: no test data, or no global model."""
EIGHT_BIT, NUMBERS = "8-bit", "numbers"
"""What a node's inputs are: bytes, which models see as numbers from 0 to 1, or numbers that they see as they are."""
LONGEST = 2000
"""Characters of a text that somebody else wrote."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def quoted(text: str) -> str:
    """What somebody else wrote, as one short line without surprises."""
    return ascii(" ".join(text[:LONGEST].split()))[1:-1][:300]


def first_head(run: str, client: int) -> str:
    """The head of a client of whom nothing was counted yet."""
    return digest(f"{run} {client}".encode())


def next_head(head: str, round: int, attempt: int, upload: str, share: float) -> str:
    return digest(f"{head} {round} {attempt} {upload} {share!r}".encode())


@dataclass(frozen=True)
class _Fields:
    """A message as plain fields: whole numbers, finite numbers, texts and bytes."""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """The message, or a WireError: no field missing, none too many, each of its type and of no odd value."""
        kinds = get_type_hints(cls)
        names = [f.name for f in fields(cls)]
        if missing := [name for name in names if name not in given]:
            raise WireError(f"the message lacks '{missing[0]}'")
        if extra := [name for name in given if name not in kinds]:
            raise WireError(f"the message has a field nobody knows: {ascii(extra[0])[:50]}")
        for name in names:
            if type(given[name]) is not kinds[name]:
                wanted = schema.KINDS.get(kinds[name], "bytes")
                raise WireError(f"the message's '{name}' is a {type(given[name]).__name__}, expected {wanted}")
            if kinds[name] is float and not math.isfinite(given[name]):
                raise WireError(f"the message's '{name}' is not finite")
        return cls(**{name: given[name] for name in names})


@dataclass(frozen=True)
class Order(_Fields):
    """From the server to a node."""

    kind: str
    run: str
    client: int
    round: int
    """Counted from 0: the round to train in, or rounds that are done."""
    attempt: int
    head: str
    """Where the client's chain is."""
    share: float
    """Of the last upload that was counted."""
    payload: bytes = b""
    note: str = ""
    """What was wrong with the node's last message, if something was."""
    recipe: str = ""
    start: bytes = b""
    account: bytes = b""
    """To enrol: the whole request, the initial model and the client's books."""


@dataclass(frozen=True)
class Report(_Fields):
    """From a node to the server."""

    kind: str
    status: str
    run: str
    client: int
    round: int
    attempt: int
    examples: int = 0
    inputs: str = ""
    """Of what kind they are, where the node enrols."""
    payload: bytes = b""
    digest: str = ""
    """SHA-256 of the payload."""
    address: bytes = b""
    """What of the client's new state the server has to know to address it."""
    accuracy_global: float = UNKNOWN
    accuracy_personal: float = UNKNOWN
    parameters: int = 0
    """Numbers that the personal model needs."""
    reason: str = ""
