"""What is measured of a run: accuracies over clients, fairness, sizes of models, the paper's gigabytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedslr.matrix import LowRank
from fedslr.tree import Tree, leaves

PerClient = list[float | None]
MODELS = ("global", "personal")


class Evaluation(NamedTuple):
    """Every client's accuracy under the global and under its own model; None where a method has no global model."""

    global_: PerClient | None
    personal: PerClient


def average(values: Sequence[float | None] | None) -> float | None:
    """The plain average over the clients that have test data."""
    known = [v for v in values or [] if v is not None]
    return fmean(known) if known else None


def _evaluations(records: Sequence[Mapping[str, Any]], model: str, clients: str) -> list[dict[int, float]]:
    """The accuracies of every evaluation that had any: of all clients, or of those sampled in that round."""
    found = []
    for record in records:
        each = record.get(f"accuracy_{model}_per_client")
        if not each:
            continue
        whose = record.get("evaluated") or range(len(each))
        sampled = set(record["clients"] if clients == "sampled" else whose)
        if known := {c: v for c, v in zip(whose, each, strict=True) if c in sampled and v is not None}:
            found.append(known)
    return found


LATE = 5
"""Evaluations at a run's end whose mean says more than the last, which depends on who trained in that round."""


def _picked(records: Sequence[Mapping[str, Any]], model: str, pick: str, clients: str) -> list[float] | None:
    """The accuracies of the last evaluation, of the one whose mean is best, or every client's mean of the last few."""
    found = _evaluations(records, model, clients)
    if not found:
        return None
    if pick == "late":
        late = found[-LATE:]
        return [fmean(one[c] for one in late if c in one) for c in sorted(set().union(*late))]
    chosen = max(found, key=lambda one: fmean(one.values())) if pick == "best" else found[-1]
    return list(chosen.values())


def evaluations(records: Sequence[Mapping[str, Any]]) -> int:
    """How many of the rounds were evaluated."""
    return len(_evaluations(records, "personal", "all"))


def accuracy(records: Sequence[Mapping[str, Any]], pick: str = "last", clients: str = "all") -> dict[str, float | None]:
    """The accuracy of both models, over clients and evaluations.

    `pick` is "last", "best" or "late" (the mean of the last five), `clients` is "all" or "sampled".
    """
    return {model: average(_picked(records, model, pick, clients)) for model in MODELS}


def worst_decile(
    records: Sequence[Mapping[str, Any]], pick: str = "last", clients: str = "all", model: str = "personal"
) -> float | None:
    """The mean accuracy of the tenth of the clients (one at least) that a model serves worst."""
    known = sorted(_picked(records, model, pick, clients) or [])
    return fmean(known[: max(1, len(known) // 10)]) if known else None


def fairness(record: Mapping[str, Any]) -> dict[str, dict[str, float] | None]:
    """How evenly a model serves clients: the deviation over them, and the mean of the tenth that is served worst."""
    found: dict[str, dict[str, float] | None] = {}
    for model in MODELS:
        worst, known = worst_decile([record], model=model), _picked([record], model, "last", "all")
        found[model] = None if known is None or worst is None else {"std": pstdev(known), "worst_decile": worst}
    return found


def gigabytes(numbers: float) -> float:
    """The paper's unit of communication: four bytes for every number sent, up or down, in 10⁹ bytes."""
    return numbers * 4 / 1e9


PAPER_MODEL = 11_173_952
"""The paper's ResNet18 with ten classes. Its tables scale every model to this size, whatever its number of classes."""


def paper_gigabytes(numbers: float, dense: int) -> float:
    """What the paper's Table 2 prints: the share of a dense model that was sent, times `PAPER_MODEL`."""
    return gigabytes(numbers / dense * PAPER_MODEL)


def parameters(tree: Tree) -> int:
    """Numbers a model given by its parts needs: factors where they are smaller, non-zeros elsewhere."""
    return parameters_of([tree])[0]


def parameters_of(trees: Sequence[Tree]) -> list[int]:
    """`parameters` of several models of one kind, whose non-zeros are read back once, for a GPU is waited for."""
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
    """How many of its numbers are not zero, for each of some tensors of one shape."""
    first = tensors[0]
    if all(x is first for x in tensors):
        return torch.count_nonzero(first).expand(len(tensors))
    if first.is_cuda:
        # Few operations on much at a time.
        return (torch.stack(list(tensors)) != 0).flatten(1).sum(1)
    return torch.stack([torch.count_nonzero(x) for x in tensors])


class Sizes(NamedTuple):
    """Numbers a deployed model needs."""

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
