"""What every dataset is read into."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedslr.data.normalization import Normalization


class Dataset(NamedTuple):
    """Pooled data, before they are split over clients."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    test_samples: int
    """How many test samples a client gets unless told otherwise."""
    crop_padding: int = 0
    """Zero pixels around an image for random crops; 0 where training images are taken as they are."""
    normalization: Normalization | None = None
    """How 8-bit images become numbers; None where inputs are taken as they are."""
