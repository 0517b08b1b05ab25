"""Samples of map-style datasets, as torch and Hugging Face have them, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.data.client_data import client_label
from fedslr.data.decoded_cache import Array

LABEL_COLUMNS = ("label", "labels", "target", "y")
"""The columns that are taken for the label if a sample is a mapping and no columns are named."""


def read_clients(
    train: Sequence[Any], test: Sequence[Any] | None, columns: Sequence[str] | None, names: Sequence[str] | None
) -> list[dict[str, Array]]:
    """Return the arrays of every client."""
    if not isinstance(train, list | tuple) or not (test is None or len(test) == len(train)):
        raise FedslrError(
            f"train: got a {type(train).__name__}, expected a list with a dataset for every client, and as many test "
            "datasets or none; Federation.from_pooled splits one pool of samples"
        )
    clients = []
    for i, dataset in enumerate(train):
        label = client_label(i, names)
        x, y = read_dataset(f"{label}: train", dataset, columns)
        clients.append({"x": x, "y": y})
        if test is not None:
            x, y = read_dataset(f"{label}: test", test[i], columns)
            clients[i] |= {"x_test": x, "y_test": y}
    return clients


def read_dataset(where: str, dataset: Any, columns: Sequence[str] | None) -> tuple[Array, Array]:
    """Return the inputs and the labels of all samples of a dataset with a length and an index."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise FedslrError(
            f"{where} is a {type(dataset).__name__}, expected a dataset with a length and an index; pass a map-style "
            "dataset, such as a loader's .dataset"
        )
    if not len(dataset):
        raise FedslrError(f"{where} is empty, expected at least one sample; leave this client out")
    pairs = [_pair(where, dataset[i], columns) for i in range(len(dataset))]
    try:
        x, y = (np.stack([_numbers(value) for value in part]) for part in zip(*pairs, strict=True))
    except ValueError:
        raise FedslrError(f"{where}: samples differ in shape; resize or pad them in the dataset's transform") from None
    return x, y


def _pair(where: str, sample: Any, columns: Sequence[str] | None) -> tuple[Any, Any]:
    """Return the input and the label of a sample, which is a pair or a mapping with two columns."""
    if isinstance(sample, Mapping):
        x, y = columns or _guess_columns(where, sample)
        if x in sample and y in sample:
            return sample[x], sample[y]
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    found = f"the columns {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else f"{type(sample).__name__}"
    raise FedslrError(
        f"{where}: a sample is {found}, expected an input and a label; name the two columns of a mapping with columns="
    )


def _guess_columns(where: str, sample: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the input and the label of a sample with two columns, one of which is called like a label."""
    labels = [name for name in sample if name in LABEL_COLUMNS]
    others = [name for name in sample if name not in LABEL_COLUMNS]
    if len(labels) != 1 or len(others) != 1:
        raise FedslrError(
            f"{where}: a sample has the columns {', '.join(map(str, sample))}; name the input and the label, such as "
            'columns=("image", "label")'
        )
    return others[0], labels[0]


def _numbers(value: Any) -> Array:
    """Return an input or a label as an array; images of Pillow get their channels first."""
    array = np.asarray(value)
    if hasattr(value, "getbands"):
        return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return array
