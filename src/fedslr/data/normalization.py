"""The normalization of 8-bit images. They stay 8-bit in memory until a batch uses them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Normalization(NamedTuple):
    """Mean and standard deviation of every channel, for pixels from 0 to 1; one value stands for all channels."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (x/255 − mean)/deviation for images x of shape (…, channels, height, width).

        The result is computed in single precision and then converted, so that every engine sees the same inputs.
        """
        full, mean, deviation = _constants(self, x.device)
        return (x / full).sub_(mean).div_(deviation).to(dtype)


UNIT = Normalization((0.0,), (1.0,))
"""The normalization to pixels from 0 to 1."""


@functools.lru_cache(maxsize=64)
def _constants(normalization: Normalization, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return 255, mean and deviation as tensors that are sent to the device once."""
    # CUDA divides by a Python number through its reciprocal; a quotient of tensors is rounded as on a CPU.
    full = torch.tensor(255.0, dtype=torch.float32, device=device)
    mean, deviation = (
        torch.tensor(v[0] if len(v) == 1 else [[[c]] for c in v], dtype=torch.float32, device=device)
        for v in normalization
    )
    return full, mean, deviation


def inputs(x: Tensor, normalization: Normalization | None, dtype: torch.dtype) -> Tensor:
    """Return a client's x as the model receives it: normalised, or as it is if there is no normalization."""
    return x if normalization is None else normalization(x, dtype)
