"""A multilayer perceptron for tables and small images."""

from __future__ import annotations

from math import prod

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Two hidden layers."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(prod(input_shape), width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.first(x.flatten(1))))))
        return out
