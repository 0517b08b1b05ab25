"""Pooled datasets, before their partition over clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedslr.data.client_data import ARRAY_NAMES, ClientData
from fedslr.data.decoded_cache import Arrays
from fedslr.data.normalization import Normalization
from fedslr.data.partitions import Indices

IMAGE_TEST_SAMPLES = 100
"""The default number of test samples per client in datasets of image files."""

TARGET_STRATA = 5
"""The groups into which the targets of a regression are divided, for splits by label."""


class Dataset(NamedTuple):
    """Pooled data, before its partition over clients."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    test_samples: int
    """The default number of test samples per client."""
    crop_padding: int = 0
    """Zero pixels around a training image before it is cropped at random; 0 disables flips and crops."""
    normalization: Normalization | None = None
    """The normalization of 8-bit images; None leaves inputs as they are."""
    class_names: tuple[str, ...] | None = None
    """The names of the classes, from class 0 on."""

    def strata(self) -> tuple[tuple[Indices, Indices], int]:
        """Return the labels by which training and test samples are split, and their number.

        The labels of a regression are the fifths of the training targets, from the smallest to the largest.
        """
        y, y_test = self.y.numpy(), self.y_test.numpy()
        if not self.y.is_floating_point():
            return (y, y_test), self.num_classes
        edges = np.quantile(y, np.arange(1, TARGET_STRATA) / TARGET_STRATA)
        return (np.searchsorted(edges, y), np.searchsorted(edges, y_test)), TARGET_STRATA

    def client(self, train: Indices, test: Indices) -> ClientData:
        """Return the data of a client with these training and test samples, given as indices."""

        def part(x: Tensor, samples: Indices) -> Tensor:
            # numpy copies whole images at once; torch copies single elements, in threads that wait for each other.
            return torch.from_numpy(x.numpy()[samples])

        return ClientData(part(self.x, train), part(self.y, train), part(self.x_test, test), part(self.y_test, test))


def image_dataset(
    arrays: Arrays,
    num_classes: int,
    normalization: Normalization,
    crop_padding: int = 0,
    class_names: Sequence[str] | None = None,
) -> Dataset:
    """Return decoded 8-bit images as a dataset."""
    x, y, x_test, y_test = (torch.from_numpy(np.ascontiguousarray(arrays[part])) for part in ARRAY_NAMES)
    names = None if class_names is None else tuple(class_names)
    return Dataset(x, y, x_test, y_test, num_classes, IMAGE_TEST_SAMPLES, crop_padding, normalization, names)
