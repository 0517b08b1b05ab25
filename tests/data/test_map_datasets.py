"""Map-style datasets of torch and of Hugging Face's form, and objects that are no arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedslr

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 4)), np.arange(10) % 2


class Rows:
    """A dataset as Hugging Face has it: a length, an index, and samples that are mappings."""

    column_names = ("text", "label")

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: values[i] for name, values in self.columns.items()}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a stream has no end")


@pytest.fixture
def torch_dataset() -> Dataset[Any]:
    return TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def test_datasets_become_clients(torch_dataset):
    rows = Rows({"features": X, "label": Y})
    federation = fedslr.Federation.from_datasets([torch_dataset, rows], test=[rows, torch_dataset], client_names="ab")
    assert federation.client_names == ["a", "b"]
    for client in federation.clients:
        assert np.array_equal(client.x, X)
        assert np.array_equal(client.x_test, X)
        assert np.array_equal(client.y, Y)
    held = fedslr.Federation.from_datasets([torch_dataset], seed=3).clients[0]
    assert (len(held.y), len(held.y_test)) == (8, 2)


def test_columns_are_named_or_guessed():
    rows = Rows({"id": np.arange(10), "x": X, "sick": Y})
    (client,) = fedslr.Federation.from_datasets([rows], columns=("x", "sick"), test=[rows]).clients
    assert np.array_equal(client.y, Y)


def test_images_get_their_channels_first():
    pixels = RNG.integers(0, 256, (10, 6, 5, 3), np.uint8)
    images = Rows({"image": [Image.fromarray(image) for image in pixels], "label": Y})
    grey = Rows({"image": [Image.fromarray(image[..., 0]) for image in pixels], "label": Y})
    (client,) = fedslr.Federation.from_datasets([images], test=[images]).clients
    assert np.array_equal(client.x, pixels.transpose(0, 3, 1, 2))
    assert client.x.dtype == torch.uint8
    assert fedslr.Federation.from_datasets([grey]).input_shape == (1, 6, 5)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ([Stream()], "client 0: train is a Stream, expected a dataset with a length and an index; pass a map-style"),
        ([DataLoader(TensorDataset(torch.zeros(2)))], "client 0: train is a DataLoader, expected a dataset with a len"),
        (TensorDataset(torch.zeros(2)), "train: got a TensorDataset, expected a list with a dataset for every client"),
        ([TensorDataset(torch.zeros(2))], "client 0: train: a sample is tuple, expected an input and a label"),
        ([Rows({"a": X, "b": Y})], "client 0: train: a sample has the columns a, b; name the input and the label"),
        ([Rows({"x": [*X[:9], X[0, :2]], "y": Y})], "client 0: train: samples differ in shape; resize or pad them"),
        ([[]], "client 0: train is empty, expected at least one sample; leave this client out"),
    ],
)
def test_other_objects_are_refused_in_a_line(train, says):
    with pytest.raises(fedslr.FedslrError) as error:
        fedslr.Federation.from_datasets(train)
    assert str(error.value).startswith(says)


def test_every_client_needs_a_test_dataset_or_none(torch_dataset):
    with pytest.raises(fedslr.FedslrError, match="expected a list with a dataset for every client, and as many test"):
        fedslr.Federation.from_datasets([torch_dataset], test=[torch_dataset] * 2)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize(
    ("array", "says"),
    [
        (Stream(), " is a Stream, expected an array, a tensor or a list of numbers; use Federation.from_datasets"),
        (Rows({}), " is a Rows, expected an array, a tensor or a list of numbers; use Federation.from_datasets"),
        (
            DataLoader(TensorDataset(torch.zeros(2))),
            " is a DataLoader, expected an array, a tensor or a list of numbers; pass its",
        ),
        ((n for n in range(3)), " is a generator, expected an array, a tensor or a list of numbers; make an array of"),
        ({"a": 1}, " is a dict, expected an array, a tensor or a list of numbers; make an array of it with numpy"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_are_no_arrays_are_refused_at_once(name, array, says):
    arrays = {"x": X, "y": Y, name: array}
    for read, where in ((lambda: fedslr.Federation.from_arrays([arrays]), f"client 0: {name}"),
                        (lambda: fedslr.Federation.from_pooled(**arrays), name)):  # fmt: skip
        with pytest.raises(fedslr.FedslrError) as error:
            read()
        assert str(error.value).startswith(where + says)


def test_sequences_of_numbers_are_arrays():
    arrays = {"x": [(0.0, 1.0), (2.0, 3.0)], "y": range(2), "x_test": [], "y_test": []}
    assert fedslr.Federation.from_arrays([arrays]).clients[0].y.tolist() == [0, 1]
