"""The size of models in parameters, and the paper's unit of communication."""

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
    """Return the paper's unit of communication: four bytes for every number sent, up or down, in 10⁹ bytes."""
    return numbers * 4 / 1e9


PAPER_MODEL = 11_173_952
"""The paper's ResNet18 with ten classes. Its tables scale every model to this size, whatever its number of classes."""


def paper_gigabytes(numbers: float, dense: int) -> float:
    """Return the figure of the paper's Table 2: the share of a dense model that was sent, times `PAPER_MODEL`."""
    return gigabytes(numbers / dense * PAPER_MODEL)


def parameters(tree: Tree) -> int:
    """Return the parameters that a model must store: factors where they are smaller, non-zeros elsewhere."""
    return parameters_of([tree])[0]


def parameters_of(trees: Sequence[Tree]) -> list[int]:
    """Return `parameters` of several models of one kind; a GPU is waited for only once."""
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
    """Count the non-zeros of each of several tensors of one shape."""
    first = tensors[0]
    if all(x is first for x in tensors):
        return torch.count_nonzero(first).expand(len(tensors))
    if first.is_cuda:
        # Few operations on much at a time.
        return (torch.stack(list(tensors)) != 0).flatten(1).sum(1)
    return torch.stack([torch.count_nonzero(x) for x in tensors])


class Sizes(NamedTuple):
    """The parameters that a deployed model stores."""

    dense: int
    global_: int
    personal: list[int]

    def summary(self) -> dict[str, float]:
        return {
            "dense": self.dense,
            "global": self.global_,
            "personal": fmean(self.personal),
            "personal_std": pstdev(self.personal),
        }
