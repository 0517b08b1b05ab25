"""The digits that ship with scikit-learn: 1,797 images of 8×8 pixels in ten classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedslr.data.dataset import Dataset

DIGITS_SCALING = "Pixels p from 0 to 16 are given as (p − 4.8836)/6.0161."
"""The scaling of `digits`, for the cards of exported models."""


def digits(root: Path) -> Dataset:
    """Return the digits with mean 0 and standard deviation 1; a fixed stratified quarter is held out for testing.

    A client gets 40 test samples by default, because a client may hold a single class, and every class has 44.
    """
    # scikit-learn takes a second to import.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch: Any = load_digits()
    x = bunch.images[:, None].astype(np.float32)
    y = bunch.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, stratify=y, random_state=0)
    scaled = torch.from_numpy((x - x[train].mean()) / x[train].std())
    labels = torch.from_numpy(y)
    return Dataset(scaled[train], labels[train], scaled[test], labels[test], num_classes=10, test_samples=40)
