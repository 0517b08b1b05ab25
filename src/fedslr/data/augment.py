"""Random flips and crops of a batch of images, drawn from a seed, so that every engine makes the same ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class FlipsAndCrops(NamedTuple):
    """The flip and the crop of every image of a batch, as arrays or as tensors on the images' device."""

    flip: Any
    """Whether the image is mirrored horizontally."""
    top: Any
    left: Any
    """The first row and column of the crop in the padded image; the padding as value does not shift the image."""


def draw_flips_and_crops(count: int, padding: int, rng: np.random.Generator) -> FlipsAndCrops:
    """Draw a horizontal flip with probability ½, and a random crop after zero-padding with probability ½."""
    flip, crop = rng.random(count) < 0.5, rng.random(count) < 0.5
    top, left = np.where(crop, rng.integers(0, 2 * padding + 1, (2, count)), padding)
    return FlipsAndCrops(flip, top, left)


def apply_flips_and_crops(x: Tensor, padding: int, drawn: FlipsAndCrops) -> Tensor:
    """Return the images, flipped, zero-padded and cropped as drawn."""
    count, _, height, width = x.shape
    columns = torch.arange(width, device=x.device)
    columns = torch.where(drawn.flip[:, None], width - 1 - columns, columns)
    rows = drawn.top[:, None] + torch.arange(height, device=x.device)
    padded = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1)
    sample = torch.arange(count, device=x.device)[:, None, None]
    places = (sample, rows[:, :, None], (drawn.left[:, None] + columns)[:, None, :])
    return padded[places].permute(0, 3, 1, 2).contiguous()


def flip_and_crop(x: Tensor, padding: int, rng: np.random.Generator) -> Tensor:
    """Return the images, flipped and cropped at random."""
    drawn = draw_flips_and_crops(len(x), padding, rng)
    return apply_flips_and_crops(x, padding, FlipsAndCrops(*(torch.from_numpy(part).to(x.device) for part in drawn)))
