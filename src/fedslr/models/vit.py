"""A small vision transformer: Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021), at the size of a phone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedslr.models.input_shapes import require_images


class ViT(nn.Module):
    """Patches of an eighth of the image (at least 2 pixels), four layers, the mean of the tokens for the head."""

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
