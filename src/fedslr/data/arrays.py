"""Users' arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedslr.core.errors import FedslrError

LABEL_ENCODING = "numpy.searchsorted(names, y) with one sorted list of all class names for all clients"
"""The way to encode class names as integers from 0 that are the same at every client."""


def as_tensor(where: str, array: Any, labels: bool = False) -> Tensor:
    """Return a copy of an array of numbers, or of integer class labels, as a tensor; masked entries become NaN."""
    try:
        if isinstance(array, Tensor) and not labels:
            return array.detach().clone()
        copy = np.array(np.ma.filled(array.detach().cpu().numpy() if isinstance(array, Tensor) else array, np.nan))
        if labels:
            # Lists without labels are arrays of floats.
            copy = copy.astype(np.int64, casting="same_kind" if copy.size else "unsafe")
        return torch.from_numpy(copy.astype(copy.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        kind = f"integer class labels (encode class names by {LABEL_ENCODING})" if labels else "an array of numbers"
        raise FedslrError(f"{where} is not {kind}: {' '.join(str(error).split())}") from error


def require_finite(where: str, x: Tensor) -> None:
    """Refuse inputs that are not finite in single precision, the type that models compute in."""
    if x.is_floating_point() and not bool(torch.isfinite(x.float()).all()):
        raise FedslrError(f"{where} has values that are not finite (NaN, infinity, above 3.4e38); clean the data first")
