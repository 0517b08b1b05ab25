"""8-bit images as numbers: they stay 8-bit until a batch of them is used."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Normalization(NamedTuple):
    """What makes numbers of mean 0 and deviation 1 of 8-bit images, by channel; one value stands for all channels."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(x/255 − mean)/deviation of images (…, channels, height, width), on their device.

        Computed in single precision whatever the type that is asked for: every engine sees the same numbers.
        """
        full, mean, deviation = _constants(self, x.device)
        return (x / full).sub_(mean).div_(deviation).to(dtype)


UNIT = Normalization((0.0,), (1.0,))
"""Pixels from 0 to 1."""


@functools.lru_cache(maxsize=64)
def _constants(normalization: Normalization, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """255, mean and deviation on a device: sent there once, not with every batch."""
    # CUDA multiplies by the reciprocal of a Python number; a quotient of tensors is rounded as on a CPU.
    full = torch.tensor(255.0, dtype=torch.float32, device=device)
    mean, deviation = (
        torch.tensor(v[0] if len(v) == 1 else [[[c]] for c in v], dtype=torch.float32, device=device)
        for v in normalization
    )
    return full, mean, deviation


def inputs(x: Tensor, normalization: Normalization | None, dtype: torch.dtype) -> Tensor:
    """What a model is given of a client's x: normalised where there is something to normalise by, else x itself."""
    return x if normalization is None else normalization(x, dtype)
