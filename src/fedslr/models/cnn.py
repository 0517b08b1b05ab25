"""A small convolutional network for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedslr.errors import FedslrError


class CNN(nn.Module):
    """Two 3×3 convolutions with group norm, the second with stride 2, and two linear layers."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 16) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise FedslrError(
                f"model.name: 'cnn' takes images (channels, height, width), got inputs of {list(input_shape)}"
            )
        channels, height, breadth = input_shape
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, 2 * width)
        self.hidden = nn.Linear(2 * width * ((height + 1) // 2) * ((breadth + 1) // 2), 4 * width)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        out: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return out
