"""One pool of samples over clients: laws of the splits, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedslr
from fedslr.data import partitions

SPLITS = ("dirichlet", "iid", "pathological", "quantity")


def pool(total: int = 120, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Samples that their only feature numbers."""
    y = np.random.default_rng(0).integers(0, classes, total)
    y[:classes] = range(classes)
    return np.arange(total, dtype=np.float64)[:, None], y


def owners(federation: fedslr.Federation) -> list[list[float]]:
    """The numbers of every client's samples."""
    return [sorted(torch.cat([c.x, c.x_test])[:, 0].tolist()) for c in federation.clients]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=30, max_size=90),
    split=st.sampled_from(SPLITS),
    clients=st.integers(3, 10),
    per_client=st.integers(2, 3),
    alpha=st.sampled_from([0.05, 1.0, 100.0]),
    seed=st.integers(0, 3),
)
def test_every_sample_belongs_to_one_client(labels, split, clients, per_client, alpha, seed):
    x, y = np.arange(len(labels), dtype=np.float64)[:, None], np.array(labels)
    options = {"clients": clients, "split": split, "alpha": alpha, "classes_per_client": per_client, "seed": seed}
    held = owners(fedslr.Federation.from_pooled(x, y, num_classes=5, **options))
    assert len(held) == clients
    assert all(held)
    assert sorted(number for mine in held for number in mine) == list(range(len(labels)))
    if split == "pathological":
        assert max(len({labels[int(number)] for number in mine}) for mine in held) <= per_client
    if split in ("iid", "dirichlet"):
        assert max(map(len, held)) - min(map(len, held)) <= 1
    assert held == owners(fedslr.Federation.from_pooled(x, y, num_classes=5, **options))


@pytest.mark.parametrize("split", SPLITS)
def test_another_seed_is_another_split(split):
    x, y = pool()
    drawn = [owners(fedslr.Federation.from_pooled(x, y, clients=6, split=split, alpha=1.0, seed=s)) for s in (0, 1)]
    assert drawn[0] != drawn[1]


def test_shards_of_equal_classes_are_equally_large():
    labels = np.repeat(np.arange(10), 40)
    mine = partitions.pathological_partition(labels, 20, 2, np.random.default_rng(0))
    assert {len(samples) for samples in mine} == {20}


def test_sizes_follow_the_concentration():
    rng = np.random.default_rng(0)
    even, skewed = (partitions.dirichlet_sizes(1000, 10, alpha, rng) for alpha in (1e4, 0.1))
    assert sum(even) == sum(skewed) == 1000
    assert max(even) - min(even) < 20
    assert max(skewed) > 300
    assert min(skewed) >= 1


@pytest.mark.parametrize("split", ["pathological", "quantity"])
def test_datasets_are_split_by_classes_and_by_size(split):
    federation = fedslr.load("digits", clients=12, split=split, alpha=1.0, classes_per_client=3)
    assert sum(len(c.y) for c in federation.clients) == 1347
    if split == "pathological":
        assert max(len(set(c.y.tolist())) for c in federation.clients) <= 3
        assert all(set(c.y_test.tolist()) <= set(c.y.tolist()) for c in federation.clients)
    else:
        sizes = [len(c.y) for c in federation.clients]
        assert max(sizes) > 3 * min(sizes)
    with pytest.raises(fedslr.FedslrError, match=f"split = '{split}' always uses all samples"):
        fedslr.load("digits", clients=12, split=split, samples_per_client=5)


def test_a_column_of_ids_names_the_clients():
    x, y = pool()
    ids = np.array(["north", "south", "east"])[np.arange(len(y)) % 3]
    federation = fedslr.Federation.from_pooled(x, y, clients=ids)
    assert federation.client_names == ["east", "north", "south"]
    assert owners(federation)[1] == list(range(0, 120, 3))
    assert fedslr.Federation.from_pooled(x, y, clients=np.arange(120) % 7).client_names == list("0123456")


def test_texts_become_class_names():
    x, y = pool()
    federation = fedslr.Federation.from_pooled(x, np.array(["d", "c", "b", "a"])[y], clients=np.zeros(120))
    assert federation.class_names == ["a", "b", "c", "d"]
    (client,) = federation.clients
    assert client.y.tolist() == [3 - y[int(number)] for number in client.x[:, 0]]


def test_labels_of_any_values_can_be_split():
    x, y = pool()
    federation = fedslr.Federation.from_pooled(x, 2 * y, clients=4, split="dirichlet", num_classes=7)
    assert sorted(n for mine in owners(federation) for n in mine) == list(range(120))


def test_arguments_of_from_arrays_pass_through():
    x, y = pool()
    federation = fedslr.Federation.from_pooled(x, y, clients=2, test=0.5, validation=0.5, name="mine", num_classes=9)
    assert (federation.name, federation.num_classes) == ("mine", 9)
    assert [(len(c.y), len(c.y_test)) for c in federation.clients] == [(15, 30), (15, 30)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"y": np.zeros(3, int)}, "y: got 3 labels for 120 samples of x; expected one label for every sample"),
        ({"y": np.linspace(0, 1, 120)}, "split: got 'dirichlet', but y holds no classes (shape [120], type float64)"),
        ({"clients": [1, 2]}, "clients: got ids of shape [2], expected a number of clients, or one id for each of 120"),
        ({"clients": 121}, "data.clients: 121 clients with 1 training samples each need 121 samples"),
        ({"clients": 0}, "clients: got 0, expected a whole number from 1"),
        ({"split": "authors"}, 'split: got "authors", expected one of dirichlet, iid, pathological, quantity'),
        ({"alpha": 0}, "alpha: got 0, expected a number above 0"),
        (
            {"split": "pathological", "clients": 3, "classes_per_client": 1},
            "data.classes_per_client: 3 clients with 1 classes each need 3 parts of classes, expected at least 4",
        ),
    ],
)
def test_a_wrong_split_is_refused_in_a_line(options, says):
    x, y = pool()
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.Federation.from_pooled(**{"x": x, "y": y, **options})
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)
