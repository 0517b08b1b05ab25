"""What every dataset is read into."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedslr.data.federation import ClientData
from fedslr.data.normalization import Normalization
from fedslr.data.splits import Indices


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
    class_names: tuple[str, ...] | None = None
    """What the classes are called, from class 0 on."""

    def client(self, train: Indices, test: Indices) -> ClientData:
        """The data of a client that holds these samples."""

        def part(x: Tensor, held: Indices) -> Tensor:
            # numpy copies whole images; torch goes by numbers, in threads that wait for each other on a busy machine.
            return torch.from_numpy(x.numpy()[held])

        return ClientData(part(self.x, train), part(self.y, train), part(self.x_test, test), part(self.y_test, test))
