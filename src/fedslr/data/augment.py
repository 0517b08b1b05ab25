"""Random flips and crops of a whole batch of images at once, drawn from a seed: the same for every engine."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def flip_and_crop(x: Tensor, padding: int, rng: np.random.Generator) -> Tensor:
    """With probability ½ a horizontal flip; with probability ½ a random crop after zero-padding."""
    count, _, height, width = x.shape
    flip, crop = (torch.from_numpy(rng.random(count) < 0.5).to(x.device) for _ in range(2))
    drawn = torch.from_numpy(rng.integers(0, 2 * padding + 1, (2, count))).to(x.device)
    down, right = torch.where(crop, drawn, padding)
    columns = torch.arange(width, device=x.device)
    columns = torch.where(flip[:, None], width - 1 - columns, columns)
    rows = down[:, None] + torch.arange(height, device=x.device)
    padded = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1)
    sample = torch.arange(count, device=x.device)[:, None, None]
    return padded[sample, rows[:, :, None], (right[:, None] + columns)[:, None, :]].permute(0, 3, 1, 2).contiguous()
