"""The digits that ship with scikit-learn: 1,797 real 8×8 images of handwritten digits, ten labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedslr.data.dataset import Dataset

SCALING = "Pixels p from 0 to 16 are given as (p − 4.8836)/6.0161."
"""What `digits` does to them, for those who use a model on images of their own."""


def digits(root: Path) -> Dataset:
    """A fixed quarter is held out for testing, every digit by the same share; pixels have mean 0, deviation 1.

    A client gets 40 test samples: there are 44 of each digit, and a client may see one digit alone.
    """
    # scikit-learn is a second of start-up, which only those who use it should pay.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch: Any = load_digits()
    x = bunch.images[:, None].astype(np.float32)
    y = bunch.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, stratify=y, random_state=0)
    mean, deviation = x[train].mean(), x[train].std()
    scaled = torch.from_numpy((x - mean) / deviation)
    labels = torch.from_numpy(y)
    return Dataset(scaled[train], labels[train], scaled[test], labels[test], num_classes=10, test_samples=40)
