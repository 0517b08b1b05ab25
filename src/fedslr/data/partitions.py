"""Partitions of a dataset over clients: IID, Dirichlet, the authors', and test sets that follow them.

A partition takes labels and gives every client an array of sample indices. All clients get the same number of samples;
only in the authors' partition does client 0 get more.
"""

from __future__ import annotations

from bisect import bisect_right
from decimal import Decimal
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError

Indices = np.ndarray[Any, np.dtype[np.int64]]
Generator = np.random.Generator


def samples_per_client(total: int, clients: int, requested: int | None, reuse: bool = False) -> int:
    """Return the number of training samples per client: as requested, or as many as there are for all."""
    each = total // clients if requested is None else requested
    if each < 1 or (each * clients > total and not reuse):
        raise FedslrError(
            f"data.clients: {clients} clients with {max(each, 1)} training samples each need {clients * max(each, 1)}, "
            f"but there are only {total}; choose fewer clients or fewer samples_per_client"
        )
    return each


def iid_partition(labels: Indices, clients: int, each: int, rng: Generator) -> list[Indices]:
    """Return every client's samples, drawn uniformly."""
    order = rng.permutation(len(labels))
    return [order[i * each : (i + 1) * each] for i in range(clients)]


def dirichlet_priors(clients: int, classes: int, alpha: float, rng: Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return every client's label prior, drawn from Dir(α): the smaller α, the fewer labels a client sees."""
    return rng.dirichlet(np.full(classes, alpha), size=clients)


def partition_by_priors(
    labels: Indices, priors: np.ndarray[Any, Any], each: int, rng: Generator, reuse: bool = False
) -> list[Indices]:
    """Return every client's samples, drawn by its label prior.

    In every step a random client that still needs samples draws a label from its prior and takes the next sample of
    that class. A class without samples left is no longer drawn: the priors are renormalised over the other classes.
    With `reuse` such a class starts again, as in the authors' code.
    """
    clients, classes = priors.shape
    # Lists and `bisect`: a draw looks at a handful of numbers, for which a call of numpy would take longer.
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
    taken = [0] * classes
    live = np.array([len(pool) > 0 for pool in pools])
    cumulative, below = _cumulative_priors(priors, live)
    chosen: list[list[int]] = [[] for _ in range(clients)]
    open_clients = list(range(clients))
    picks, draws = rng.random((clients * each, 2)).T.tolist()
    for pick, draw in zip(picks, draws, strict=True):
        slot = int(pick * len(open_clients))
        client = open_clients[slot]
        row = cumulative[client]
        label = bisect_right(row, min(draw * row[-1], below[client]))
        chosen[client].append(pools[label][taken[label] % len(pools[label])])
        taken[label] += 1
        if not reuse and taken[label] == len(pools[label]):
            live[label] = False
            cumulative, below = _cumulative_priors(priors, live)
        if len(chosen[client]) == each:
            open_clients[slot] = open_clients[-1]
            open_clients.pop()
    return [np.array(indices, np.int64) for indices in chosen]


def _cumulative_priors(
    priors: np.ndarray[Any, Any], live: np.ndarray[Any, Any]
) -> tuple[list[list[float]], list[float]]:
    """Return cumulative priors over the live classes, and the largest numbers below their totals.

    If no class of a client's prior is live, it takes any live class.
    """
    left = priors * live
    left[left.sum(axis=1) <= 0] = live
    # Dead classes have no width, and the last live one ends at the total: a draw below it can land on live ones only.
    sums = np.cumsum(left, axis=1)
    return sums.tolist(), np.nextafter(sums[:, -1], 0.0).tolist()


def authors_partition(
    labels: Indices, test_labels: Indices, clients: int, classes: int, alpha: float, test_size: int, seed: int
) -> list[tuple[Indices, Indices]]:
    """Return every client's training and test samples in the partition that the authors' published code makes.

    It makes the same draws in the same order from NumPy's older generator. Every class needs samples. Shares are cut to
    whole numbers after a rounding that can take one sample from every client; client 0 gets the samples that are left
    (CIFAR: 599 samples, 499 for the others).
    """
    rng = np.random.RandomState(seed % 2**32)
    order = rng.permutation(len(labels))
    rng.standard_normal(clients)  # of a spread of sizes that is 0
    # By decimals, because libraries differ in the last bit, on which it depends whether a share is cut.
    shares = np.full(clients, float(Decimal(float(Decimal(len(labels) // clients).ln())).exp()))
    missing = (shares / shares.sum() * len(labels)).astype(np.int64)
    missing[0] += len(labels) - missing.sum()
    cumulative = rng.dirichlet(np.full(classes, alpha), clients).cumsum(axis=1)
    if not np.isfinite(cumulative).all():
        raise FedslrError(f"data.alpha: got {alpha:g}, too small for the authors' split; choose 0.001 or more")
    pools = [order[labels[order] == c] for c in range(classes)]
    left = [len(pool) for pool in pools]
    chosen: list[list[int]] = [[] for _ in range(clients)]
    while missing.any():
        client = rng.randint(clients)
        if not missing[client]:
            continue
        label = int(np.argmax(rng.uniform() <= cumulative[client]))
        while not left[label]:
            # The class starts again, and a label is drawn anew.
            left[label] = len(pools[label])
            label = int(np.argmax(rng.uniform() <= cumulative[client]))
        left[label] -= 1
        missing[client] -= 1
        chosen[client].append(pools[label][left[label]])
    return [
        (mine, _authors_test_set(labels[mine], test_labels, test_size, classes, rng))
        for mine in (np.array(indices, np.int64) for indices in chosen)
    ]


def _authors_test_set(
    train_labels: Indices, test_labels: Indices, size: int, classes: int, rng: np.random.RandomState
) -> Indices:
    """Return ⌊size·ratio⌋ test samples of every class, rounded as in the authors' code."""
    parts = []
    for label in range(classes):
        pool = np.flatnonzero(test_labels == label)
        # In floating point, where 0.29 · 100 is less than 29.
        wanted = int(np.mean(train_labels == label) * size)
        parts.append(pool[rng.permutation(len(pool))[:wanted]])
    return np.concatenate(parts).astype(np.int64)


def matching_test_set(train_labels: Indices, test_labels: Indices, size: int, classes: int, rng: Generator) -> Indices:
    """Return test samples with a client's training label ratio: ⌊size·ratio⌋ of every class, without replacement.

    If the test data has fewer samples of a class, all of them are taken.
    """
    counts = np.bincount(train_labels, minlength=classes)
    parts = []
    for label in range(classes):
        pool = np.flatnonzero(test_labels == label)
        wanted = int(counts[label]) * size // len(train_labels)
        parts.append(rng.choice(pool, min(wanted, len(pool)), replace=False))
    return np.concatenate(parts).astype(np.int64)
