"""A small convolutional network for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedslr.models.input_shapes import require_images


class CNN(nn.Module):
    """Two 3×3 convolutions, the first followed by a 2×2 pool, and two linear layers."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        channels, height, breadth = require_images("cnn", input_shape, smallest=2)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (height // 2) * (breadth // 2), 4 * width)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        out: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return out
