"""The built-in models: MLP, CNN, vision transformer and ResNet18."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedslr.core.errors import FedslrError


def require_images(model: str, shape: tuple[int, ...], smallest: int = 1, square: bool = False) -> tuple[int, int, int]:
    """Return channels, height and width of images; refuse other inputs and images that the model cannot take."""
    if len(shape) != 3 or min(shape[1:]) < smallest or (square and shape[1] != shape[2]):
        kind = f"{'square ' if square else ''}images (channels, height, width) of {smallest}×{smallest} or more"
        raise FedslrError(
            f"model.name: '{model}' takes {kind}, but inputs have shape {list(shape)}; choose another model"
        )
    return shape[0], shape[1], shape[2]


class MLP(nn.Module):
    """A multilayer perceptron with two hidden layers, for tables and small images."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(prod(input_shape), width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.first(x.flatten(1))))))
        return out


class CNN(nn.Module):
    """Two 3×3 convolutions and two linear layers, for small images. A 2×2 max-pool follows the first convolution."""

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


class ViT(nn.Module):
    """A small vision transformer: Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021).

    A patch has an eighth of the image's side, but at least 2 pixels. Four layers process the patches; the head sees the
    mean of the tokens.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, width: int = 64, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        channels, side, _ = require_images("vit", input_shape, smallest=4, square=True)
        patch = next(p for p in range(max(2, side // 8), side + 1) if side % p == 0)
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(torch.randn((side // patch) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT + self.position
        out: Tensor = self.head(self.norm(self.layers(tokens)).mean(1))
        return out


NORM_GROUPS = 2
RESNET18_BLOCKS = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
"""The width and the stride of every residual block."""


class Block(nn.Module):
    """A residual block: two 3×3 convolutions beside a shortcut."""

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
    """ResNet18 with group norm, the network of the FedSLR paper: every norm has two groups.

    He et al., Deep Residual Learning (CVPR 2016); Wu & He, Group Normalization (ECCV 2018). For images of up
    to 32 pixels (CIFAR) the stem is a 3×3 convolution of stride 1 without a pool, and the head has no bias. Larger
    images (TinyImageNet) get the usual stem, a 7×7 convolution of stride 2 and a max-pool, and a head with a bias.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, _ = require_images("resnet18", input_shape)
        self.small = height <= 32
        kernel, stride, padding = (3, 1, 1) if self.small else (7, 2, 3)
        self.conv = nn.Conv2d(channels, 64, kernel, stride, padding, bias=False)
        self.norm = nn.GroupNorm(NORM_GROUPS, 64)
        widths = [64, *(width for width, _ in RESNET18_BLOCKS)]
        self.blocks = nn.Sequential(*(Block(i, o, s) for i, (o, s) in zip(widths, RESNET18_BLOCKS, strict=False)))
        self.head = nn.Linear(512, num_classes, bias=not self.small)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if not self.small:
            x = F.max_pool2d(x, 3, 2, padding=1)
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return out
