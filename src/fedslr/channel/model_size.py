"""Count the parameters of models, and convert to the paper's unit of communication."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from fedslr.core.matrix import LowRank
from fedslr.core.tree import Tree, leaves


def gigabytes(numbers: float) -> float:
    """Return the paper's gigabytes: four bytes for every number sent in either direction, in 10⁹ bytes."""
    return numbers * 4 / 1e9


PAPER_MODEL = 11_173_952
"""The parameters of the paper's ResNet18 with ten classes. The paper's tables scale models with more classes to it."""


def paper_gigabytes(numbers: float, dense: int) -> float:
    """Return communication as in the paper's Table 2.

    Args:
        numbers: How many numbers were sent in both directions.
        dense: The parameters of the dense model.
    """
    return gigabytes(numbers / dense * PAPER_MODEL)


def parameters(tree: Tree) -> int:
    """Return how many parameters a model stores: factors if they are smaller than the matrix, otherwise non-zeros."""
    return parameters_of([tree])[0]


def parameters_of(trees: Sequence[Tree]) -> list[int]:
    """Return `parameters` of several models of the same form; wait for a GPU only once."""
    totals = [0] * len(trees)
    counts: dict[torch.device, list[Tensor]] = {}
    for of_all in zip(*(leaves(tree) for tree in trees), strict=True):
        tensors = [leaf for leaf in of_all if isinstance(leaf, Tensor)]
        if len(tensors) == len(of_all):
            counts.setdefault(tensors[0].device, []).append(_nonzeros(tensors))
            continue
        for i, leaf in enumerate(of_all):
            if isinstance(leaf, LowRank):
                totals[i] += min(leaf.numbers, prod(leaf.shape))
            elif isinstance(leaf, Tensor):
                totals[i] += int(torch.count_nonzero(leaf))
    for found in counts.values():
        totals = [total + more for total, more in zip(totals, torch.stack(found).sum(0).tolist(), strict=True)]
    return totals


def _nonzeros(tensors: Sequence[Tensor]) -> Tensor:
    """Return the number of non-zeros in each of several tensors of the same shape."""
    first = tensors[0]
    if all(x is first for x in tensors):
        return torch.count_nonzero(first).expand(len(tensors))
    if first.is_cuda:
        # One operation on all tensors needs fewer kernel launches.
        return (torch.stack(list(tensors)) != 0).flatten(1).sum(1)
    return torch.stack([torch.count_nonzero(x) for x in tensors])


class Sizes(NamedTuple):
    """How many parameters the dense, the global and every client's personal model store."""

    dense: int
    global_: int
    personal: list[int]

    def summary(self) -> dict[str, float]:
        return {
            "dense": self.dense,
            "global": self.global_,
            "personal": fmean(self.personal),
            "personal_std": pstdev(self.personal),
            "shipped": shipped(self.personal, self.dense),
        }


def shipped(personal: Sequence[int], dense: int) -> float:
    """Return the mean size of personal models as they ship.

    The parts of a model can be merged into one dense model, so no model ships with more parameters than that.
    """
    return fmean(min(size, dense) for size in personal)
