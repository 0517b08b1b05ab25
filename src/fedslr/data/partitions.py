"""Partitions of a dataset over clients: IID, Dirichlet, by classes, by size, the authors', and matching test sets.

A partition takes the labels of all samples and returns an array of sample indices for every client. IID and Dirichlet
partitions get the number of samples of every client. The authors' partition gives client 0 more than the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.core.schema import one_of, positive

Alpha = Annotated[float, positive, "concentration of the Dirichlet distribution: smaller is more skewed"]
POOL_SPLITS = one_of("dirichlet", "iid", "pathological", "quantity")

Indices = np.ndarray[Any, np.dtype[np.int64]]
Generator = np.random.Generator


def samples_per_client(total: int, clients: int, requested: int | None, reuse: bool = False) -> int:
    """Return the number of training samples per client: the requested number, or an equal part of all samples."""
    each = total // clients if requested is None else requested
    if each < 1 or (each * clients > total and not reuse):
        raise FedslrError(
            f"data.clients: {clients} clients with {max(each, 1)} training samples each need {clients * max(each, 1)} "
            f"samples, but the dataset has {total}; choose fewer clients or fewer samples_per_client"
        )
    return each


def even_sizes(total: int, clients: int) -> list[int]:
    """Return the number of samples of every client, in which clients differ by at most one; all samples are used."""
    each = samples_per_client(total, clients, None)
    return [each + (i < total % clients) for i in range(clients)]


def partition(
    labels: Indices,
    split: str,
    sizes: Sequence[int],
    classes: int,
    alpha: float,
    classes_per_client: int,
    rng: Generator,
    reuse: bool = False,
) -> list[Indices]:
    """Return every client's samples by the name of a split; `pathological` and `quantity` choose sizes themselves."""
    if split == "pathological":
        return pathological_partition(labels, len(sizes), classes_per_client, rng)
    if split == "dirichlet":
        priors = dirichlet_priors(len(sizes), classes, alpha, rng)
        return partition_by_priors(labels, priors, sizes, rng, reuse)
    if split == "quantity":
        sizes = dirichlet_sizes(len(labels), len(sizes), alpha, rng)
    return iid_partition(labels, sizes, rng)


def iid_partition(labels: Indices, sizes: Sequence[int], rng: Generator) -> list[Indices]:
    """Return every client's samples, drawn uniformly."""
    order = rng.permutation(len(labels))
    return np.split(order, np.cumsum(sizes))[:-1]


def dirichlet_sizes(total: int, clients: int, alpha: float, rng: Generator) -> list[int]:
    """Return the number of samples of every client: one each, and the others by shares drawn from Dir(α)."""
    cuts = np.floor(rng.dirichlet(np.full(clients, alpha)).cumsum() * (total - clients)).astype(np.int64)
    cuts[-1] = total - clients  # The shares' sum is rounded.
    sizes: list[int] = (1 + np.diff(cuts, prepend=0)).tolist()
    return sizes


def pathological_partition(labels: Indices, clients: int, classes_per_client: int, rng: Generator) -> list[Indices]:
    """Return every client's samples: shards of one class each, dealt at random (after McMahan et al., 2017).

    Every sample belongs to one client. Large classes are cut into more shards, so that shards are about equally large.
    McMahan's shards may cross the border of two classes; these do not. So a client has at most `classes_per_client`
    classes, and fewer if it is dealt two shards of one class.
    """
    classes, counts = np.unique(labels, return_counts=True)
    shards = clients * classes_per_client
    if not len(classes) <= shards <= len(labels):
        raise FedslrError(
            f"data.classes_per_client: {clients} clients with {classes_per_client} classes each need {shards} parts of "
            f"classes, expected at least {len(classes)}, the number of classes, and at most {len(labels)}, the "
            "number of samples; change clients or classes_per_client"
        )
    cut = np.ones(len(classes), np.int64)
    for _ in range(shards - len(classes)):
        cut[np.argmax(counts / cut)] += 1
    pieces = [
        piece
        for label, count in zip(classes, cut, strict=True)
        for piece in np.array_split(rng.permutation(np.flatnonzero(labels == label)), count)
    ]
    dealt = rng.permutation(shards).reshape(clients, classes_per_client)
    return [np.concatenate([pieces[shard] for shard in mine]) for mine in dealt]


def dirichlet_priors(clients: int, classes: int, alpha: float, rng: Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return every client's label prior, drawn from Dir(α): the smaller α, the fewer labels a client sees."""
    return rng.dirichlet(np.full(classes, alpha), size=clients)


def partition_by_priors(
    labels: Indices, priors: np.ndarray[Any, Any], sizes: Sequence[int], rng: Generator, reuse: bool = False
) -> list[Indices]:
    """Return every client's samples, drawn by its label prior.

    In every step a random client that still needs samples draws a label from its prior and takes the next sample of
    that class. Once all samples of a class are taken, the priors are renormalised over the other classes. With `reuse`
    the samples of such a class are taken again, as in the authors' code.
    """
    clients, classes = priors.shape
    # Lists and `bisect` are faster than numpy here, because a draw reads only a handful of numbers.
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(classes)]
    taken = [0] * classes
    live = np.array([len(pool) > 0 for pool in pools])
    cumulative, below = _cumulative_priors(priors, live)
    chosen: list[list[int]] = [[] for _ in range(clients)]
    open_clients = list(range(clients))
    picks, draws = rng.random((sum(sizes), 2)).T.tolist()
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
        if len(chosen[client]) == sizes[client]:
            open_clients[slot] = open_clients[-1]
            open_clients.pop()
    return [np.array(indices, np.int64) for indices in chosen]


def _cumulative_priors(
    priors: np.ndarray[Any, Any], live: np.ndarray[Any, Any]
) -> tuple[list[list[float]], list[float]]:
    """Return cumulative priors over the classes with samples left (`live`), and the largest numbers below their totals.

    A client takes any live class if none of its prior's classes is live.
    """
    left = priors * live
    left[left.sum(axis=1) <= 0] = live
    # Dead classes have width 0, and the last live class ends at the total: a draw below the total hits a live class.
    sums = np.cumsum(left, axis=1)
    return sums.tolist(), np.nextafter(sums[:, -1], 0.0).tolist()


def authors_partition(
    labels: Indices, test_labels: Indices, clients: int, classes: int, alpha: float, test_size: int, seed: int
) -> list[tuple[Indices, Indices]]:
    """Return every client's training and test samples in the partition of the authors' published code.

    The draws and their order are those of the authors, from NumPy's older generator. Every class needs samples.
    Rounding can take one sample from every client; client 0 gets these samples (CIFAR: 599 samples, the others 499).
    """
    rng = np.random.RandomState(seed % 2**32)
    order = rng.permutation(len(labels))
    rng.standard_normal(clients)  # The authors draw sizes with a spread of 0.
    # Decimals, because libraries differ in the last bit of a logarithm, and that bit decides how a size is rounded.
    shares = np.full(clients, float(Decimal(float(Decimal(len(labels) // clients).ln())).exp()))
    missing = (shares / shares.sum() * len(labels)).astype(np.int64)
    missing[0] += len(labels) - missing.sum()
    cumulative = rng.dirichlet(np.full(classes, alpha), clients).cumsum(axis=1)
    if not np.isfinite(cumulative).all():
        raise FedslrError(f"data.alpha: got {alpha:g}, which is too small for split = 'authors'; choose 0.001 or more")
    pools = [order[labels[order] == c] for c in range(classes)]
    left = [len(pool) for pool in pools]
    chosen: list[list[int]] = [[] for _ in range(clients)]
    while missing.any():
        client = rng.randint(clients)
        if not missing[client]:
            continue
        label = int(np.argmax(rng.uniform() <= cumulative[client]))
        while not left[label]:
            # Reuse the samples of this class, and draw another label.
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
    # The ratio is a floating-point number: 0.29 · 100 is less than 29.
    wanted = [int(np.mean(train_labels == label) * size) for label in range(classes)]
    return _draw_by_class(test_labels, wanted, lambda pool, count: pool[rng.permutation(len(pool))[:count]])


def matching_test_set(train_labels: Indices, test_labels: Indices, size: int, classes: int, rng: Generator) -> Indices:
    """Return test samples with a client's training label ratio: ⌊size·ratio⌋ of every class, without replacement.

    If the test data has fewer samples of a class, all of them are taken.
    """
    wanted = np.bincount(train_labels, minlength=classes) * size // len(train_labels)
    return _draw_by_class(test_labels, wanted, lambda pool, n: rng.choice(pool, min(n, len(pool)), replace=False))


def _draw_by_class(labels: Indices, wanted: Iterable[int], draw: Callable[[Indices, int], Indices]) -> Indices:
    """Return samples of all classes: `draw` gets the indices of a class and the wanted number of samples."""
    drawn = [draw(np.flatnonzero(labels == label), count) for label, count in enumerate(wanted)]
    return np.concatenate(drawn).astype(np.int64)
