"""Hold-outs for testing and validation: disjoint, seeded, stratified by label."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedslr
from conftest import make_arrays
from fedslr.data import hold_out
from fedslr.data.client_data import ClientData
from fedslr.engine import fingerprints

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def train_only(sizes: list[int]) -> list[dict[str, np.ndarray]]:
    """Clients without test samples; the first feature numbers the samples of all clients."""
    clients = [{"x": arrays["x"], "y": arrays["y"]} for arrays in make_arrays(sizes, (6,))]
    for i, arrays in enumerate(clients):
        arrays["x"][:, 0] = np.arange(len(arrays["x"])) + 1000 * i
    return clients


def numbers(x: torch.Tensor) -> list[float]:
    return x[:, 0].tolist()


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, part=st.floats(0, 0.95), seed=st.integers(0, 5))
def test_a_hold_out_keeps_the_label_ratio_within_one_sample(labels, part, seed):
    y = np.array(labels)
    keep, held = hold_out.hold_out(y, part, seed, 0, hold_out.TEST)
    assert sorted([*keep, *held]) == list(range(len(y)))
    assert len(keep) >= 1
    assert (len(held) > 0) == (part > 0 and len(y) > 1)
    for label in set(labels):
        assert abs((y[held] == label).sum() - (y == label).sum() * len(held) / len(y)) < 1


def test_a_hold_out_depends_on_seed_client_and_purpose_only():
    y = np.repeat([0, 1, 2], 30)
    keys = list(itertools.product((0, 1), (0, 1), (hold_out.TEST, hold_out.VALIDATION)))
    drawn = [tuple(hold_out.hold_out(y, 0.3, *key)[1]) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn == [tuple(hold_out.hold_out(y, 0.3, *key)[1]) for key in keys]


@pytest.mark.parametrize("y", [np.linspace(0, 1, 20), np.zeros((20, 3), np.int64)])
def test_labels_that_are_no_classes_are_held_out_at_random(y):
    keep, held = hold_out.hold_out(y, 0.25, 0, 0, hold_out.TEST)
    assert (len(keep), len(held)) == (15, 5)


def test_a_fifth_is_held_out_for_testing_if_there_is_no_test_set():
    clients = train_only([50, 20, 1])
    federation = fedslr.Federation.from_arrays(clients)
    assert [(len(c.y), len(c.y_test)) for c in federation.clients] == [(40, 10), (16, 4), (1, 0)]
    for arrays, client in zip(clients, federation.clients, strict=True):
        assert sorted(numbers(client.x) + numbers(client.x_test)) == arrays["x"][:, 0].tolist()
    again = fedslr.Federation.from_arrays(clients)
    other = fedslr.Federation.from_arrays(clients, seed=1)
    assert torch.equal(federation.clients[0].x, again.clients[0].x)
    assert not torch.equal(federation.clients[0].x, other.clients[0].x)
    assert not len(fedslr.Federation.from_arrays(clients, test=0).clients[0].y_test)


def test_given_test_and_validation_samples_stay_as_they_are():
    (arrays,) = make_arrays([9], (6,))
    given_ = {**arrays, "x_val": arrays["x_test"][:3], "y_val": arrays["y_test"][:3]}
    (client,) = fedslr.Federation.from_arrays([given_], validation=0.5).clients
    assert (len(client.y), len(client.y_test)) == (9, 7)
    assert client.y_val is not None
    assert client.y_val.tolist() == arrays["y_test"][:3].tolist()
    assert fedslr.Federation.from_arrays([arrays]).clients[0].y_val is None


def test_validation_is_held_out_of_the_training_samples():
    clients = train_only([50, 20])
    plain, divided = (fedslr.Federation.from_arrays(clients, validation=v) for v in (0, 0.25))
    for before, after in zip(plain.clients, divided.clients, strict=True):
        assert torch.equal(before.x_test, after.x_test)
        assert after.x_val is not None
        assert len(after.x_val) == len(before.x) // 4
        assert sorted(numbers(after.x) + numbers(after.x_val)) == sorted(numbers(before.x))


def test_validation_of_a_dataset_takes_training_samples_only():
    plain, divided = (fedslr.load("digits", clients=5, validation=v) for v in (None, 0.2))
    for before, after in zip(plain.clients, divided.clients, strict=True):
        assert after.y_val is not None
        assert torch.equal(torch.cat([after.y, after.y_val]).sort().values, before.y.sort().values)
        assert torch.equal(after.x_test, before.x_test)
    result = fedslr.run(fedslr.FedAvg(), divided, model="mlp", rounds=1)
    assert result.summary["rounds"] == 1


def test_validation_samples_go_to_the_device_with_the_others():
    x, y = torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    moved = ClientData(x, y, x, y, x, y).to(torch.device("cpu"), torch.float64)
    assert moved.x_val is not None
    assert moved.x_val.dtype == torch.float64
    assert repr(moved) == "<3 training, 3 validation and 3 test samples>"


def test_a_resumed_run_notices_other_validation_samples():
    (arrays,) = make_arrays([9], (6,))
    drawn = [{**arrays, "x_val": arrays["x_test"][i : i + 2], "y_val": [0, 1]} for i in (0, 1)]
    assert len({fingerprints.of_data(fedslr.Federation.from_arrays([c])) for c in (arrays, *drawn)}) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"x_test": np.zeros((3, 6))},
            "client 0: got a mapping with x, y, x_test, expected a mapping with x and y for ",
        ),
        ({"x_val": np.zeros((3, 6)), "y_val": [0, 1]}, "client 0: y_val "),
    ],
)
def test_halves_of_a_pair_are_refused(change, says):
    (arrays,) = train_only([9])
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.Federation.from_arrays([{**arrays, **change}])
    assert str(error.value).startswith(says)


@pytest.mark.parametrize("option", ["test", "validation"])
def test_a_part_is_below_one(option):
    with pytest.raises(fedslr.FedslrError, match=f"{option}: got 1.5, expected a number from 0 to below 1"):
        fedslr.Federation.from_arrays(train_only([9]), **{option: 1.5})
