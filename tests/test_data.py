"""Splits keep their promises, batches repeat themselves, own arrays are taken or refused in plain words."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedslr
from conftest import make_arrays, make_federation
from fedslr.core import seeds
from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.data import splits
from fedslr.data.batches import ShuffledData
from fedslr.data.digits import digits as read_digits
from fedslr.data.federation import ClientData

LABELS = np.random.default_rng(0).integers(0, 10, 3000)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 60), alpha=st.floats(0.01, 100), seed=st.integers(0, 1000), share=st.floats(0.1, 1))
def test_dirichlet_is_disjoint_and_equal(clients, alpha, seed, share):
    each = max(1, int(share * len(LABELS) / clients))
    priors = splits.dirichlet_priors(clients, 10, alpha, rng(seed))
    held = splits.by_priors(LABELS, priors, each, rng(seed))
    assert [len(h) for h in held] == [each] * clients
    everything = np.concatenate(held)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(LABELS)


@settings(max_examples=20, deadline=None)
@given(clients=st.integers(1, 40), seed=st.integers(0, 1000))
def test_iid_is_disjoint_and_equal(clients, seed):
    each = len(LABELS) // clients
    held = splits.iid(LABELS, clients, each, rng(seed))
    assert [len(h) for h in held] == [each] * clients
    assert len(np.unique(np.concatenate(held))) == each * clients


def drawn_with_arrays(labels, priors, each, rng, reuse):
    """What `by_priors` does, one numpy call after another."""

    def cumulative():
        left = priors * live
        left[left.sum(axis=1) <= 0] = live
        return np.cumsum(left, axis=1)

    pools = [rng.permutation(np.flatnonzero(labels == c)) for c in range(priors.shape[1])]
    taken, live = np.zeros(len(pools), int), np.array([len(pool) > 0 for pool in pools])
    sums, chosen, open_clients = cumulative(), [[] for _ in priors], list(range(len(priors)))
    for pick, draw in rng.random((len(priors) * each, 2)):
        slot = int(pick * len(open_clients))
        client = open_clients[slot]
        total = sums[client, -1]
        label = int(np.searchsorted(sums[client], min(draw * total, np.nextafter(total, 0.0)), side="right"))
        chosen[client].append(int(pools[label][taken[label] % len(pools[label])]))
        taken[label] += 1
        if not reuse and taken[label] == len(pools[label]):
            live[label] = False
            sums = cumulative()
        if len(chosen[client]) == each:
            open_clients[slot] = open_clients[-1]
            open_clients.pop()
    return chosen


@settings(max_examples=25, deadline=None)
@given(
    clients=st.integers(1, 30),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 1000),
    reuse=st.booleans(),
    all=st.booleans(),
)
def test_splits_are_drawn_as_ever(clients, alpha, seed, reuse, all):
    """To the last sample, whether classes run out or not; and what is drawn afterwards is the same too."""
    labels = LABELS[:900][LABELS[:900] != 4]
    each = max(1, len(labels) // clients // (1 if all else 3))
    priors = splits.dirichlet_priors(clients, 10, alpha, rng(seed))
    ours, theirs = rng(seed), rng(seed)
    held = splits.by_priors(labels, priors, each, ours, reuse)
    assert [h.tolist() for h in held] == drawn_with_arrays(labels, priors, each, theirs, reuse)
    assert ours.random() == theirs.random()


@pytest.mark.parametrize(
    ("samples", "clients", "classes", "alpha", "seed", "sizes", "digest"),
    [
        (50_000, 100, 10, 0.1, 0, [599, 499, 499], "ecf6e78f08b5392f"),
        (1000, 13, 7, 0.3, 5, [88, 76, 76], "aa50070dc548fa70"),
    ],
)
def test_the_authors_split_is_theirs(samples, clients, classes, alpha, seed, sizes, digest):
    """To the last sample: digests are of what their procedure gave for the same labels."""
    labels, test_labels = np.arange(samples) % classes, np.arange(max(300, samples // 5)) % classes
    made = splits.authors(labels, test_labels, clients, classes, alpha, 100, seed)
    assert [len(train) for train, _ in made[:3]] == sizes
    assert sum(len(train) for train, _ in made) == samples
    everything = np.concatenate([np.concatenate(shares) for shares in made]).astype("<i8")
    assert hashlib.sha256(everything.tobytes()).hexdigest()[:16] == digest


def test_the_authors_split_needs_all_classes():
    with pytest.raises(FedslrError, match="needs samples of all 3 classes, got those of 2"):
        splits.authors(np.arange(100) % 2, np.arange(30) % 3, 5, 3, 0.1, 10, 0)


def test_the_authors_split_of_a_dataset():
    options = {"split": "authors", "clients": 20, "alpha": 0.3}
    one, same, other = (fedslr.load("digits", seed=seed, **options) for seed in (0, 0, 1))
    assert [c.y.tolist() for c in one.clients] == [c.y.tolist() for c in same.clients]
    assert [c.y.tolist() for c in one.clients] != [c.y.tolist() for c in other.clients]
    assert sum(len(c.y) for c in one.clients) == 1347
    for client in one.clients:
        assert set(client.y_test.tolist()) <= set(client.y.tolist())


def test_label_ratios_follow_the_prior():
    """With plenty of every class, each client's counts are a draw from its prior: χ² stays in its range."""
    labels = np.repeat(np.arange(10), 20_000)
    priors = splits.dirichlet_priors(20, 10, 0.5, rng(3))
    held = splits.by_priors(labels, priors, 2000, rng(4))
    for prior, mine in zip(priors, held, strict=True):
        expected = 2000 * prior
        counts = np.bincount(labels[mine], minlength=10)
        common = expected > 5
        statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
        assert statistic < 35


def test_smaller_alpha_is_more_skewed():
    def largest_share(alpha: float) -> float:
        federation = fedslr.load("digits", clients=20, alpha=alpha, samples_per_client=30, seed=0)
        return float(np.mean([np.bincount(c.y).max() / len(c.y) for c in federation.clients]))

    assert largest_share(0.05) > largest_share(0.5) > largest_share(50) > 0.1


def test_a_class_that_runs_out_starts_again_with_reuse():
    labels = np.array([0] * 5 + [1] * 500)
    priors = np.array([[1.0, 0.0]])
    again = splits.by_priors(labels, priors, 20, rng(), reuse=True)[0]
    assert sorted(np.bincount(again, minlength=5)[:5]) == [4] * 5
    once = splits.by_priors(labels, priors, 20, rng())[0]
    assert np.bincount(labels[once]).tolist() == [5, 15]


def test_a_prior_is_renormalised_over_what_is_left():
    """One class gone, the others keep their proportions."""
    labels = np.array([0] * 10 + [1] * 40_000 + [2] * 40_000)
    (mine,) = splits.by_priors(labels, np.array([[0.6, 0.3, 0.1]]), 20_000, rng(1))
    counts = np.bincount(labels[mine], minlength=3)
    assert counts[0] == 10
    assert counts[1] / counts[2] == pytest.approx(3, rel=0.1)


def test_samples_of_a_class_are_taken_at_random():
    labels = np.zeros(1000, int)
    (mine,) = splits.by_priors(labels, np.array([[1.0]]), 100, rng(0))
    assert mine.mean() == pytest.approx(500, abs=100)
    assert sorted(mine) != list(range(100))


def test_no_two_random_streams_are_the_same():
    """Whatever they are for: equal keys of different purposes, and keys that differ by a zero, draw differently."""
    keys = [
        (p, 0, *k) for p in range(4) for k in itertools.chain(*(itertools.product((0, 1), repeat=n) for n in range(4)))
    ]
    drawn = {seeds.generator(*key).integers(2**62) for key in keys}
    assert len(drawn) == len(keys)
    assert len({seeds.integer(*key) for key in keys}) == len(keys)


def test_clients_are_interleaved():
    """No client is served last: when a class is scarce, those of low and high number get the same share of it."""
    labels = np.array([0] * 400 + [1] * 4000)
    priors = np.full((40, 2), 0.5)
    held = splits.by_priors(labels, priors, 100, rng())
    scarce = np.array([(labels[h] == 0).sum() for h in held])
    assert abs(scarce[:20].mean() - scarce[20:].mean()) < 4
    assert scarce.min() > 0


@pytest.mark.parametrize("options", [{"split": "iid"}, {"alpha": 0.1}, {"alpha": 0.1, "reuse": True}])
def test_a_split_is_a_function_of_its_seed(options):
    a, b, other = (fedslr.load("digits", clients=10, seed=s, **options) for s in (3, 3, 4))
    for left, right in zip(a.clients, b.clients, strict=True):
        assert torch.equal(left.x, right.x)
        assert torch.equal(left.y_test, right.y_test)
    assert not torch.equal(a.clients[0].x, other.clients[0].x)


def test_test_sets_follow_the_training_ratio():
    """⌊size · count/n⌋ of every class, without replacement; no more than there are."""
    data = read_digits(Path())
    federation = fedslr.load("digits", clients=20, alpha=0.1, seed=1)
    available = np.bincount(data.y_test)
    for client in federation.clients:
        counts = np.bincount(client.y, minlength=10)
        expected = np.minimum(counts * 40 // len(client.y), available)
        assert np.bincount(client.y_test, minlength=10).tolist() == expected.tolist()
        assert len(torch.unique(client.x_test.flatten(1), dim=0)) == len(client.x_test)


def test_floor_is_exact():
    """0.29 · 100 is 28.999… in floating point; 29 of 100 must give 29."""
    labels = np.array([0] * 29 + [1] * 71)
    test = splits.matching_test_set(labels, np.repeat([0, 1], 200), 100, 2, rng())
    assert len(test) == 100


def test_digits_are_the_real_ones():
    data = read_digits(Path())
    assert (len(data.x), len(data.x_test)) == (1347, 450)
    assert tuple(data.x.shape[1:]) == (1, 8, 8)
    assert np.bincount(data.y).min() > 120
    federation = fedslr.load("digits", clients=20)
    assert [len(c.y) for c in federation.clients] == [67] * 20
    assert (federation.num_classes, federation.input_shape, federation.name) == (10, (1, 8, 8), "digits")


def batches(
    size: int = 7, batch: int = 3, seed: int = 0, round: int = 0, client: int = 0, phase: int = 0, epochs: int = 2
):
    x = torch.arange(size)
    data = ShuffledData(x.float()[:, None], x, batch, seed, round, client)
    return [b.y.tolist() for b in data.epochs(epochs, phase)]


def test_every_epoch_is_a_fresh_shuffle_and_keeps_its_short_last_batch():
    found = batches()
    assert [len(b) for b in found] == [3, 3, 1, 3, 3, 1]
    first, second = (list(itertools.chain(*epoch)) for epoch in (found[:3], found[3:]))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second


def test_batches_repeat_by_seed_round_client_and_phase():
    assert batches() == batches()
    for change in ({"seed": 1}, {"round": 1}, {"client": 1}, {"phase": 1}):
        assert batches() != batches(**change)


def test_inputs_and_labels_stay_together():
    data = ShuffledData(torch.arange(9.0)[:, None], torch.arange(9), 4, 0, 0, 0)
    assert all(torch.equal(b.x[:, 0], b.y.float()) for b in data.epochs(3))


def test_own_arrays_of_many_kinds():
    clients = make_arrays([4, 9], (3,))
    clients[1] = {k: torch.from_numpy(v) for k, v in clients[1].items()}
    clients.append({"x": [[1, 2, 3]], "y": [0], "x_test": np.zeros((0, 3)), "y_test": np.zeros(0, int)})
    federation = fedslr.Federation.from_arrays(clients)
    assert [len(c.y) for c in federation.clients] == [4, 9, 1]
    assert federation.num_classes == 3
    assert all(c.x.is_floating_point() for c in federation.clients)
    images = fedslr.Federation.from_arrays(
        [
            {
                "x": np.full((2, 1, 4, 4), 255, np.uint8),
                "y": [0, 1],
                "x_test": np.zeros((1, 1, 4, 4), np.uint8),
                "y_test": [1],
            }
        ]
    )
    assert images.clients[0].x.dtype == torch.uint8
    assert float(images.inputs(images.clients[0].x).max()) == 1.0


def broken(change):
    clients = make_arrays([4, 5], (3,))
    change(clients)
    return clients


def poison(client, part, index, value):
    def change(clients):
        clients[client][part][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.clear(), "clients: got none"),
        (lambda c: c[1].pop("y_test"), "client 1: y_test is missing"),
        (lambda c: c[1].update(z=1), "client 1: unknown part 'z'"),
        (lambda c: c.__setitem__(1, 3), "client 1: got a int"),
        (lambda c: c[1].update(x=np.zeros((0, 3)), y=np.zeros(0, int)), "client 1: x is empty"),
        (lambda c: c[1].update(y=[0]), "client 1: x has 5 samples but y has 1 labels"),
        (lambda c: c[1].update(y=np.zeros(5)), "client 1: y must be one axis of whole-number labels"),
        (lambda c: c[1].update(x=np.zeros((5, 4))), r"client 1: x holds inputs of shape \[4\], client 0 of \[3\]"),
        (lambda c: c[1].update(x=np.zeros(5)), "client 1: x has 1 axes"),
        (
            lambda c: c[0].update(y=np.array(["a"] * 4)),
            "client 0: y is no array of numbers: its entries are of type <U1",
        ),
        (
            lambda c: c[0].update(y=np.array(["a"] * 4)),
            r"such as numpy.searchsorted\(names, y\) with one sorted list of all classes for all clients",
        ),
        (lambda c: c[0].update(x=np.ma.masked_array(np.ones((4, 3)), np.eye(4, 3))), "masked array, 3 entries of it"),
        (lambda c: c[1].update(x=["a"] * 5), "client 1: x is no array of numbers"),
        (poison(1, "x", (0, 1), np.nan), "client 1: x has numbers that are not finite"),
        (poison(0, "x_test", (0, 1), np.inf), "client 0: x_test has numbers that are not finite"),
        (poison(1, "x", (0, 1), 1e39), "client 1: x has numbers that are not finite"),
        (poison(1, "y", 2, 7), "client 1: y has label 7, expected 0 to 2"),
        (poison(1, "y", 2, -1), "client 1: y has label -1, expected 0 to 2"),
    ],
)
def test_wrong_arrays_are_refused_in_one_line(change, says):
    with pytest.raises(FedslrError, match=says) as refused:
        fedslr.Federation.from_arrays(broken(change), num_classes=3)
    assert "\n" not in str(refused.value)
    assert str(refused.value).count("client 0: ") <= 1


def test_arrays_are_taken_as_they_are_now_and_in_any_byte_order():
    """A buffer that is filled anew for every client is another client's data afterwards."""
    buffer, clients = torch.zeros(4, 3), []

    def made():
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield {"x": buffer, "y": [0, 1, 0, 1], "x_test": buffer, "y_test": np.array([0, 1, 0, 1], ">i4")}

    clients = fedslr.Federation.from_arrays(made()).clients
    assert [float(c.x.mean()) for c in clients] == [1.0, 2.0]
    swapped = np.arange(12, dtype=">f4").reshape(4, 3)
    (client,) = fedslr.Federation.from_arrays(
        [{"x": swapped, "y": [0] * 4, "x_test": swapped, "y_test": [0] * 4}]
    ).clients
    assert client.x.tolist() == swapped.tolist()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "digit"}, "data.name: got 'digit', no such dataset; did you mean 'digits'?"),
        ({"clients": 2000}, "data.clients: got 2000, but there are only 1347 training samples"),
        (
            {"clients": 10, "samples_per_client": 200},
            "data.samples_per_client: got 200, but 10 clients can have at most 134",
        ),
        ({"alpha": 0}, "data.alpha: got 0, expected a number above 0"),
        ({"split": "authors", "alpha": 1e-5}, "data.alpha: got 1e-05, too small for the authors' split"),
        ({"split": "authors", "samples_per_client": 3}, "the authors' split shares out all samples; leave it out"),
        ({"split": "dirichle"}, 'data.split: got "dirichle", expected one of iid, dirichlet'),
        ({"clents": 3}, "unknown key 'clents' in data; did you mean 'clients'?"),
    ],
)
def test_wrong_splits_are_refused(options, says):
    with pytest.raises(FedslrError) as refused:
        fedslr.load(**{"name": "digits", **options})
    assert says in str(refused.value)


@pytest.mark.parametrize("label", [10**7, 10**12])
def test_labels_that_do_not_count_from_0_are_told_of(label):
    """They are article numbers or dates: a model with a score for each would not fit anywhere."""
    clients = make_arrays([5, 8], (6,))
    clients[1]["y"][0] = label
    with pytest.raises(
        FedslrError, match=f"highest label is {label}, but only 4 different ones occur; expected labels"
    ):
        fedslr.Federation.from_arrays(clients)
    clients[1]["y"][0] = 79
    with pytest.warns(FedslrWarning, match=r"go up to 79 \(client 1\), .* and 3, 4, 5, 6, 7 and 71 more of them never"):
        assert fedslr.Federation.from_arrays(clients).num_classes == 80
    clients[1]["y"][0] = 150
    assert fedslr.Federation.from_arrays(clients, num_classes=151).num_classes == 151


def test_labels_that_nobody_learns_are_told_of():
    clients = make_arrays([5, 8], (6,))
    clients[0]["y_test"][0] = 3
    with pytest.warns(FedslrWarning, match="y_test: nobody has training data of 3, which some are tested on"):
        assert fedslr.Federation.from_arrays(clients).num_classes == 4
    clients[1]["y"][0] = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedslr.Federation.from_arrays(clients)


class Made(Sequence[ClientData]):
    """Clients that are made when they are asked for; some of the last one's data are others."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.clients = make_federation([5, 8, 6], (6,)).clients
        self.changes = changes

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, client: Any) -> Any:
        made = self.clients[client]
        return replace(made, **self.changes) if client == 2 else made


WRONG_CLIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "numpy": ({"x": np.zeros((6, 6))}, "x: got a ndarray, expected a tensor"),
    "small labels": ({"y": torch.zeros(6, dtype=torch.int32)}, r"y: got \[6\] of int32 for .* one int64 label"),
    "labels that are missing": ({"y": torch.zeros(5, dtype=torch.int64)}, r"y: got \[5\] of int64 for \[6, 6\]"),
    "another width": (
        {"x_test": torch.zeros(7, 5)},
        r"client 2: x_test holds inputs of shape \[5\], client 0 of \[6\]",
    ),
    "no samples": ({"x": torch.zeros(0, 6), "y": torch.zeros(0).long()}, "client 2: x is empty"),
    "a label too high": ({"y": torch.full((6,), 7)}, "client 2: y has label 7, expected 0 to 2"),
    "not a number": ({"x": torch.full((6, 6), float("nan"))}, "client 2: x has numbers that are not finite"),
}


@pytest.mark.parametrize("kind", WRONG_CLIENTS)
def test_clients_made_when_asked_for_are_looked_at(kind):
    changes, says = WRONG_CLIENTS[kind]
    federation = fedslr.Federation(Made(changes), 3)
    with pytest.raises(FedslrError, match=says):
        fedslr.run(fedslr.FedAvg(), federation, model=nn.Linear(6, 3), rounds=1, clients_per_round=3)
    if kind != "not a number":
        with pytest.raises(FedslrError, match=says):
            fedslr.Federation(list(Made(changes)), 3)
