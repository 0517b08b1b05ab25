"""The normalization of 8-bit images, which stay 8-bit until a batch uses them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Normalization(NamedTuple):
    """The mean and standard deviation of pixels from 0 to 1, by channel; one value stands for all channels."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (x/255 − mean)/deviation of images (…, channels, height, width), on their device.

        It is computed in single precision and then converted, so that every engine sees the same numbers.
        """
        full, mean, deviation = _constants(self, x.device)
        return (x / full).sub_(mean).div_(deviation).to(dtype)


UNIT = Normalization((0.0,), (1.0,))
"""Pixels from 0 to 1."""


@functools.lru_cache(maxsize=64)
def _constants(normalization: Normalization, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 255, mean and deviation on a device, where they are sent once."""
    # CUDA multiplies by the reciprocal of a Python number; a quotient of tensors is rounded as on a CPU.
    full = torch.tensor(255.0, dtype=torch.float32, device=device)
    mean, deviation = (
        torch.tensor(v[0] if len(v) == 1 else [[[c]] for c in v], dtype=torch.float32, device=device)
        for v in normalization
    )
    return full, mean, deviation


def inputs(x: Tensor, normalization: Normalization | None, dtype: torch.dtype) -> Tensor:
    """Return a client's x as a model gets it: normalised, or as it is if there is no normalization."""
    return x if normalization is None else normalization(x, dtype)
