"""One pool of samples, divided over clients by a column of client ids or by a split."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch

from fedslr.core import schema, seeds
from fedslr.core.errors import FedslrError
from fedslr.core.schema import countable
from fedslr.data import partitions
from fedslr.data.client_data import require_array
from fedslr.data.decoded_cache import Array
from fedslr.data.partitions import Indices


def divide(
    y: Array, clients: Any, split: str, alpha: float, classes_per_client: int, seed: int
) -> tuple[list[Indices], list[str] | None]:
    """Return the samples of every client, and the clients' names if `clients` is a column of ids."""
    if isinstance(clients, int | np.integer):
        return _split(y, int(clients), split, alpha, classes_per_client, seed), None
    ids = np.asarray(clients)
    if ids.shape != (len(y),):
        raise FedslrError(
            f"clients: got ids of shape {list(ids.shape)}, expected a number of clients, or one id for each of "
            f"{len(y)} samples"
        )
    names, client = np.unique(ids, return_inverse=True)
    order = np.argsort(client, kind="stable")
    return np.split(order, np.cumsum(np.bincount(client)))[:-1], [str(name) for name in names.tolist()]


def _split(y: Array, clients: int, split: str, alpha: float, classes_per_client: int, seed: int) -> list[Indices]:
    """Return the samples of every client of a pool that is split like a dataset."""
    schema.check_value("split", split, Annotated[str, partitions.POOL_SPLITS])
    schema.check_value("alpha", alpha, partitions.Alpha)
    schema.check_value("classes_per_client", classes_per_client, Annotated[int, countable])
    schema.check_value("clients", clients, Annotated[int, countable])
    if split in ("dirichlet", "pathological") and (y.ndim != 1 or y.dtype.kind not in "biu"):
        raise FedslrError(
            f"split: got '{split}', but y holds no classes (shape {list(y.shape)}, type {y.dtype}); choose 'iid' or "
            "'quantity'"
        )
    # The split needs labels from 0 without gaps.
    classes, labels = np.unique(y, return_inverse=True) if y.ndim == 1 else (y[:0], np.zeros(len(y), np.int64))
    sizes = partitions.even_sizes(len(y), clients)
    rng = seeds.generator(seeds.SPLIT, seed)
    return partitions.partition(labels, split, sizes, len(classes), alpha, classes_per_client, rng)


def as_labels(y: Any) -> Array:
    """Return users' labels as an array of any type."""
    require_array("y", y)
    return np.asarray(y.detach().cpu() if isinstance(y, torch.Tensor) else y)


def encode_labels(y: Array) -> tuple[Array, list[str] | None]:
    """Return labels as numbers; texts and truth values are numbered in sorted order, and their names are returned."""
    if y.dtype.kind not in "bUO":
        return y, None
    names, labels = np.unique(y.astype(str), return_inverse=True)
    return labels, [str(name) for name in names]


def require_one_label_each(x: Any, y: Any) -> None:
    """Refuse a pool whose inputs and labels differ in number."""
    if len(x) != len(y):
        raise FedslrError(f"y: got {len(y)} labels for {len(x)} samples of x; expected one label for every sample")
