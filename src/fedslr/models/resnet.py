"""ResNet18 with group norm: He et al., Deep Residual Learning (CVPR 2016); Wu & He, Group Normalization (ECCV 2018).

The paper's network: GroupNorm of 2 groups everywhere. Small images (CIFAR) have a 3×3 stem of stride 1, no pool and a
last layer without bias; larger ones (TinyImageNet) the usual 7×7 stem of stride 2, a max-pool and a bias.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedslr.models.input_shapes import require_images

NORM_GROUPS = 2
BLOCK_SHAPES = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
"""Width and stride of every block."""


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.GroupNorm(NORM_GROUPS, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Eight blocks between a stem and a linear head."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, _ = require_images("resnet18", input_shape)
        self.small = height <= 32
        kernel, stride, padding = (3, 1, 1) if self.small else (7, 2, 3)
        self.conv = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
        self.norm = nn.GroupNorm(NORM_GROUPS, 64)
        widths = [64, *(width for width, _ in BLOCK_SHAPES)]
        self.blocks = nn.Sequential(*(Block(i, o, s) for i, (o, s) in zip(widths, BLOCK_SHAPES, strict=False)))
        self.head = nn.Linear(512, num_classes, bias=not self.small)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if not self.small:
            x = F.max_pool2d(x, 3, 2, padding=1)
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return out
