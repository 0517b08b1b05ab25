"""The number of classes that clients' labels imply."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.data.arrays import LABEL_ENCODING
from fedslr.data.client_data import ClientData, client_label

MAX_SPARSE_CLASSES, MAX_CLASSES_PER_LABEL = 100, 20
"""Labels are refused as codes (dates, article numbers) if they imply more classes than the first number, and more than
the second number for every label that occurs: a model with a score for each would fill the memory."""


def count_classes(clients: Sequence[ClientData], names: Sequence[str] | None) -> int:
    """Return the highest label plus 1; refuse labels that are codes, and warn of labels that never occur."""
    highest = [max((int(y.max()) for y in (c.y, c.y_test) if y.numel()), default=0) for c in clients]
    classes = max(highest) + 1
    label = client_label(highest.index(classes - 1), names)
    trained = set(torch.cat([c.y.flatten() for c in clients]).unique().tolist())
    occurring = trained | set(torch.cat([c.y_test.flatten() for c in clients]).unique().tolist())
    if classes > MAX_SPARSE_CLASSES and classes > MAX_CLASSES_PER_LABEL * len(occurring):
        raise FedslrError(
            f"{label}: y: the highest label is {classes - 1}, but only {len(occurring)} different labels occur; "
            f"encode C classes as labels from 0 to C − 1, for instance by {LABEL_ENCODING}"
        )
    if min(occurring, default=0) == 1:
        _warn(
            f"y: labels range from 1 to {classes - 1}, which makes {classes} classes, of which class 0 never occurs; "
            "use y - 1 if that is not intended"
        )
    elif missing := sorted(set(range(classes)) - occurring):
        _warn(
            f"y: the highest label is {classes - 1} ({label}), which makes {classes} classes, but labels "
            f"{_listed(missing)} never occur; number the classes from 0 without gaps if that is not intended"
        )
    elif untrained := sorted(occurring - trained):
        _warn(f"y_test: no client has training samples of label {_listed(untrained)}, which occurs in test sets")
    return classes


def _warn(text: str) -> None:
    warnings.warn(text, FedslrWarning, stacklevel=4)


def _listed(labels: Sequence[int]) -> str:
    return ", ".join(map(str, labels[:5])) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")
