"""Kinds of targets: the labels of each task, and the number of outputs that a model needs for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The label of positions of a sequence that losses and metrics leave out, such as padding."""


@dataclass(frozen=True)
class Targets:
    """The labels of a task."""

    words: str
    """The labels of one client in words, which follow "expected"."""
    axes: tuple[int, ...]
    """The numbers of axes that the labels of a client may have."""
    outputs: str
    """The outputs of a model in words."""
    advice: str
    """The remedy for labels of another kind."""
    integer: bool = True
    """Whether labels are integers; otherwise they are floating-point numbers."""
    lowest: int = 0
    """The lowest integer label."""

    def misfit(self, y: Tensor, samples: int, classes: int) -> str | None:
        """Return what is wrong with a client's labels; None if nothing is."""
        if not (y.dtype == torch.int64 if self.integer else y.is_floating_point()):
            found = f"are {str(y.dtype).removeprefix('torch.')}"
        elif y.ndim not in self.axes or len(y) != samples:
            found = f"have shape {list(y.shape)} for {samples} samples"
        elif self.integer and y.numel() and not (self.lowest <= int(y.min()) and int(y.max()) < classes):
            found = f"range from {int(y.min())} to {int(y.max())}"
        elif not self.integer and not bool(torch.isfinite(y).all()):
            found = "have values that are not finite (NaN or infinity)"
        else:
            return None
        return f"{found}; expected {self.words.format(classes - 1, classes)}. {self.advice}"


TARGETS = {
    "classification": Targets(
        "one integer label from 0 to {0} per sample",
        (1,),
        "one score per class",
        "Encode classes as integers from 0, or set task = 'regression' for numbers",
    ),
    "binary": Targets(
        "one label, 0 or 1, per sample",
        (1,),
        "one logit",
        "Encode the two classes as 0 and 1, or set task = 'classification'",
    ),
    "multilabel": Targets(
        "{1} labels, 0 or 1, per sample: an array of shape [samples, {1}]",
        (2,),
        "one logit per label",
        "Give one column per label, with 1 where the label applies",
    ),
    "regression": Targets(
        "one number, or a row of numbers, per sample",
        (1, 2),
        "one number per target",
        "Give targets as floats, or set task = 'classification' for labels",
        integer=False,
    ),
    "sequence": Targets(
        "one integer label from 0 to {0} per token, with −100 where there is none: an array of shape [samples, tokens]",
        (2,),
        "one score per class for every token",
        "Pad sequences to one length",
        lowest=IGNORED,
    ),
}
"""The kind of target of every task."""


def outputs_for(task: str, classes: int) -> int:
    """Return the number of outputs that a model needs per sample, or per token of a sequence."""
    return 1 if task == "binary" else classes


def count_classes(task: str, labels: Sequence[Tensor]) -> int:
    """Return the number of classes, labels or numbers that a task's targets have."""
    if task == "binary":
        return 2
    if task in ("multilabel", "regression"):
        return max(y.shape[1] if y.ndim > 1 else 1 for y in labels)
    return 1 + max((int(y.max()) for y in labels if y.numel()), default=0)
