"""Random flips and crops of a whole batch of images at once, drawn from a seed: the same for every engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Moves(NamedTuple):
    """How every image of a batch is moved; arrays, or tensors where the images are."""

    flip: Any
    """Whether left and right change places."""
    down: Any
    right: Any
    """Where the crop begins in the padded image; the padding itself leaves the image where it was."""


def draw_moves(count: int, padding: int, rng: np.random.Generator) -> Moves:
    """With probability ½ a horizontal flip; with probability ½ a random crop after zero-padding."""
    flip, crop = rng.random(count) < 0.5, rng.random(count) < 0.5
    down, right = np.where(crop, rng.integers(0, 2 * padding + 1, (2, count)), padding)
    return Moves(flip, down, right)


def move(x: Tensor, padding: int, moves: Moves) -> Tensor:
    """The images moved; what comes in from outside is zero."""
    count, _, height, width = x.shape
    columns = torch.arange(width, device=x.device)
    columns = torch.where(moves.flip[:, None], width - 1 - columns, columns)
    rows = moves.down[:, None] + torch.arange(height, device=x.device)
    padded = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1)
    sample = torch.arange(count, device=x.device)[:, None, None]
    places = (sample, rows[:, :, None], (moves.right[:, None] + columns)[:, None, :])
    return padded[places].permute(0, 3, 1, 2).contiguous()


def flip_and_crop(x: Tensor, padding: int, rng: np.random.Generator) -> Tensor:
    """The images moved at random."""
    drawn = draw_moves(len(x), padding, rng)
    return move(x, padding, Moves(*(torch.from_numpy(part).to(x.device) for part in drawn)))
