"""Hold-outs: a seeded, stratified part of a client's samples for testing or for validation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from fedslr.core import schema, seeds
from fedslr.core.schema import Rule
from fedslr.data.client_data import ClientData
from fedslr.data.partitions import Indices

below_one = Rule("from 0 to below 1", lambda v: 0 <= v < 1)
TEST_PART = 0.2
"""The default part of a client's samples that is held out for testing, if the data has no test set."""

TEST, VALIDATION = range(2)
"""The purposes of hold-outs: each has its own random numbers."""


def hold_out(y: Any, part: float, seed: int, client: int, purpose: int) -> tuple[Indices, Indices]:
    """Return the samples of a client to keep and those to hold out.

    The samples are sorted by label, in random order within a label, and samples at equal distances are held out. So
    every label loses its part to within one sample. Labels that are no integers, one for each sample, are not sorted.
    A client keeps at least one sample, and loses at least one of two or more if `part` is above 0.
    """
    labels = np.asarray(y)
    total = len(labels)
    count = min(max(round(part * total), 1), total - 1) if part and total else 0
    rng = seeds.generator(seeds.SPLIT, seed, client, purpose)
    order = rng.permutation(total)
    if labels.ndim == 1 and labels.dtype.kind in "biu":
        order = order[np.argsort(labels[order], kind="stable")]
    held = np.zeros(total, bool)
    held[order[((np.arange(count) + rng.random()) * total / max(count, 1)).astype(np.int64)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def parts(y: Any, rows: Indices, test: float, validation: float, seed: int, client: int) -> dict[str, Indices]:
    """Return a client's training, test and validation samples by suffix; `rows` are its samples in the labels `y`."""
    keep, tested = hold_out(y[rows], test, seed, client, TEST)
    found = {"": rows[keep], "_test": rows[tested]}
    if validation:
        keep, held = hold_out(y[found[""]], validation, seed, client, VALIDATION)
        found |= {"": found[""][keep], "_val": found[""][held]}
    return found


def with_test(data: ClientData, part: float, seed: int, client: int) -> ClientData:
    """Return a client's data with a part of its training samples held out as its test samples."""
    if not _matches(data):
        return data
    keep, held = hold_out(data.y, part, seed, client, TEST)
    return replace(data, x=data.x[keep], y=data.y[keep], x_test=data.x[held], y_test=data.y[held])


def with_validation(data: ClientData, part: float, seed: int, client: int) -> ClientData:
    """Return a client's data with a part of its training samples held out, unless it has validation samples."""
    if not part or data.y_val is not None or not _matches(data):
        return data
    keep, held = hold_out(data.y, part, seed, client, VALIDATION)
    return replace(data, x=data.x[keep], y=data.y[keep], x_val=data.x[held], y_val=data.y[held])


def _matches(data: ClientData) -> bool:
    """Return whether every training sample has a label; other data is refused when it is validated."""
    return data.y.ndim > 0 and data.x.shape[:1] == data.y.shape[:1]


def check_part(name: str, part: Any) -> float:
    """Return a part of the samples that a user gave; refuse other numbers."""
    return float(schema.check_value(name, part, Annotated[float, below_one]))
