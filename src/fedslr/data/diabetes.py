"""The diabetes data that ships with scikit-learn: a measure of disease progression for 442 patients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedslr.data.dataset import Dataset


def diabetes(root: Path) -> Dataset:
    """Return ten measurements per patient, and the disease progression after a year in units of 100.

    A fixed quarter is held out for testing. The measurements have mean 0 and standard deviation 1. Efron et al., Least
    Angle Regression (Annals of Statistics, 2004).
    """
    # scikit-learn takes a second to import.
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    bunch: Any = load_diabetes(scaled=False)
    x, y = bunch.data.astype(np.float32), (bunch.target / 100).astype(np.float32)
    train, test = train_test_split(np.arange(len(y)), test_size=0.25, random_state=0)
    scaled = torch.from_numpy((x - x[train].mean(0)) / x[train].std(0))
    targets = torch.from_numpy(y)
    return Dataset(scaled[train], targets[train], scaled[test], targets[test], num_classes=1, test_samples=20)
