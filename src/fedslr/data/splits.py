"""Who holds which samples: IID and Dirichlet label splits, and test sets that follow them.

A split takes labels and gives every client an array of sample indices; all clients hold the same number, but in the
authors' split, where one has more.
"""

from __future__ import annotations

from bisect import bisect_right
from decimal import Decimal
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError

Indices = np.ndarray[Any, np.dtype[np.int64]]
Generator = np.random.Generator


def samples_each(total: int, clients: int, wanted: int | None, reuse: bool = False) -> int:
    """How many training samples every client gets: as asked, or as many as there are for all."""
    each = wanted if wanted is not None else total // clients
    if each < 1 or (clients > total and not reuse):
        raise FedslrError(f"data.clients: got {clients}, but there are only {total} training samples to share")
    if each * clients > total and not reuse:
        raise FedslrError(
            f"data.samples_per_client: got {each}, but {clients} clients can have at most {total // clients} each "
            f"of {total} training samples"
        )
    return each


def iid(labels: Indices, clients: int, each: int, rng: Generator) -> list[Indices]:
    """Samples dealt out at random."""
    order = rng.permutation(len(labels))
    return [order[i * each : (i + 1) * each] for i in range(clients)]


def dirichlet_priors(clients: int, classes: int, alpha: float, rng: Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Every client's own label prior, drawn from Dir(α): the smaller α, the fewer labels a client sees."""
    return rng.dirichlet(np.full(classes, alpha), size=clients)


def by_priors(
    labels: Indices, priors: np.ndarray[Any, Any], each: int, rng: Generator, reuse: bool = False
) -> list[Indices]:
    """Draw every client's samples by its label prior, interleaved.

    Again and again a random client that is not yet full draws a label from its prior and takes the next sample of that
    class. A class that has run out is drawn no more (the prior is renormalised over what is left), or, with `reuse`,
    starts again, as in the authors' code.
    """
    clients, classes = priors.shape
    # Lists and `bisect`: a draw looks at a handful of numbers, and an array's every call would cost more than they do.
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
    taken = [0] * classes
    live = np.array([len(pool) > 0 for pool in pools])
    cumulative, below = _cumulative(priors, live)
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
            cumulative, below = _cumulative(priors, live)
        if len(chosen[client]) == each:
            open_clients[slot] = open_clients[-1]
            open_clients.pop()
    return [np.array(indices, np.int64) for indices in chosen]


def _cumulative(priors: np.ndarray[Any, Any], live: np.ndarray[Any, Any]) -> tuple[list[list[float]], list[float]]:
    """Cumulative priors over the classes that are left, and the largest numbers below their totals.

    A client with none of its own left takes any.
    """
    left = priors * live
    left[left.sum(axis=1) <= 0] = live
    # Dead classes have no width, and the last live one ends at the total: a draw below it can land on live ones only.
    sums = np.cumsum(left, axis=1)
    return sums.tolist(), np.nextafter(sums[:, -1], 0.0).tolist()


def authors(
    labels: Indices, test_labels: Indices, clients: int, classes: int, alpha: float, test_size: int, seed: int
) -> list[tuple[Indices, Indices]]:
    """Every client's training and test samples in the split that the authors' published code makes of a seed.

    The same draws in the same order from NumPy's older generator, with that code's consequences: shares are cut to
    whole numbers after a rounding that can take one sample from everybody, and what is then left goes to client 0
    (CIFAR: 599 samples, 499 for the others).
    """
    if len(found := np.unique(labels)) < classes:
        raise FedslrError(f"data.split: the authors' needs samples of all {classes} classes, got those of {len(found)}")
    rng = np.random.RandomState(seed % 2**32)
    order = rng.permutation(len(labels))
    rng.standard_normal(clients)  # of a spread of sizes that is 0
    # By decimals, because libraries differ in the last bit, on which it depends whether a share is cut.
    shares = np.full(clients, float(Decimal(float(Decimal(len(labels) // clients).ln())).exp()))
    missing = (shares / shares.sum() * len(labels)).astype(np.int64)
    missing[0] += len(labels) - missing.sum()
    cumulative = rng.dirichlet(np.full(classes, alpha), clients).cumsum(axis=1)
    if not np.isfinite(cumulative).all():
        raise FedslrError(f"data.alpha: got {alpha:g}, too small for the authors' split; expected 0.001 or more")
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
    parts = []
    for label in range(classes):
        pool = np.flatnonzero(test_labels == label)
        # In floating point, where 0.29 · 100 is less than 29.
        wanted = int(np.mean(train_labels == label) * size)
        parts.append(pool[rng.permutation(len(pool))[:wanted]])
    return np.concatenate(parts).astype(np.int64)


def matching_test_set(train_labels: Indices, test_labels: Indices, size: int, classes: int, rng: Generator) -> Indices:
    """Test samples with a client's training label ratio: ⌊size·ratio⌋ of every class, without replacement.

    Where the test data have fewer of a class than that, all of them.
    """
    counts = np.bincount(train_labels, minlength=classes)
    parts = []
    for label in range(classes):
        pool = np.flatnonzero(test_labels == label)
        wanted = int(counts[label]) * size // len(train_labels)
        parts.append(rng.choice(pool, min(wanted, len(pool)), replace=False))
    return np.concatenate(parts).astype(np.int64)
