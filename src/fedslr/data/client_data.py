"""One client's data: users' arrays as tensors, and the checks before a client trains on them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.core.targets import IGNORED, Targets

ARRAY_NAMES = ("x", "y", "x_test", "y_test")
PAIRS = (("x", "y"), ("x_test", "y_test"), ("x_val", "y_val"))
"""The arrays of a client, in pairs of inputs and labels; the last two pairs may be missing."""

LABEL_ENCODING = "numpy.searchsorted(names, y) with one sorted list of all class names for all clients"
"""The way to encode class names as integers from 0 that are the same at every client."""

KINDS = {"U": "texts", "O": "Python objects", "f": "floating-point numbers", "M": "dates"}
"""Words for the types of arrays, by numpy's letters."""

MAX_SPARSE_CLASSES, MAX_CLASSES_PER_LABEL = 100, 20
"""Labels are refused as codes (dates, article numbers) if they imply more classes than the first constant, and more
classes per occurring label than the second constant: a model with a score for each class would fill the memory."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's inputs and labels, for training, for testing and, if there are any, for validation.

    The first axis of every tensor counts samples. Inputs are floating-point numbers, integers such as tokens, or 8-bit
    images. Labels are those of the federation's task: integers (int64), or floating-point numbers.
    """

    x: Tensor
    """Training inputs."""
    y: Tensor
    """Training labels."""
    x_test: Tensor
    """Test inputs; may be empty."""
    y_test: Tensor
    """Test labels; may be empty."""
    x_val: Tensor | None = None
    """Validation inputs, if samples are held out for validation."""
    y_val: Tensor | None = None
    """Validation labels."""

    def __repr__(self) -> str:
        validation = "" if self.y_val is None else f", {len(self.y_val)} validation"
        return f"<{len(self.y)} training{validation} and {len(self.y_test)} test samples>"

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the suffix, the inputs and the labels of training, test and validation samples."""
        yield "", self.x, self.y
        yield "_test", self.x_test, self.y_test
        if self.x_val is not None and self.y_val is not None:
            yield "_val", self.x_val, self.y_val

    def to(self, device: torch.device, dtype: torch.dtype) -> ClientData:
        """Return the data on a device, with floating-point numbers as `dtype`; integers keep their type."""

        def floats(x: Tensor) -> Tensor:
            return x.to(device, dtype) if x.is_floating_point() else x.to(device)

        pairs = [(floats(x), floats(y)) for _, x, y in self.parts()]
        return ClientData(*(tensor for pair in pairs for tensor in pair))


def natural_order(path: Path) -> list[tuple[str, int]]:
    """Return a key that sorts clients' files 2.npz before 10.npz."""
    return [(words, int(number or 0)) for words, number in re.findall(r"(\D*)(\d*)", path.name)]


def client_label(index: int, names: Sequence[str] | None) -> str:
    """Return the words for a client in an error message."""
    return f"client '{names[index]}'" if names is not None and index < len(names) else f"client {index}"


def require_array(where: str, array: Any) -> None:
    """Refuse objects that are no arrays, because numpy would read them for long or make an array of objects."""
    if isinstance(array, torch.utils.data.DataLoader):
        advice = "pass its dataset to Federation.from_datasets"
    elif isinstance(array, torch.utils.data.Dataset) or hasattr(array, "column_names"):
        advice = "use Federation.from_datasets"
    elif hasattr(array, "columns"):
        advice = "use Federation.from_frame, or pass frame.to_numpy()"
    elif hasattr(array, "__array__") or (isinstance(array, Sequence) and not isinstance(array, str)):
        return
    else:
        advice = "make an array of it with numpy; of a generator by numpy.array(list(…))"
    raise FedslrError(
        f"{where} is a {type(array).__name__}, expected an array, a tensor or a list of numbers; {advice}"
    )


def as_tensor(where: str, array: Any, labels: bool = False) -> Tensor:
    """Return a copy of an array of numbers, or of integer class labels, as a tensor; masked entries become NaN."""
    require_array(where, array)
    copy: np.ndarray[Any, Any] | None = None
    try:
        if isinstance(array, Tensor) and not labels:
            return array.detach().clone()
        copy = np.array(np.ma.filled(array.detach().cpu().numpy() if isinstance(array, Tensor) else array, np.nan))
        if labels:
            # An empty list of labels is an array of floats.
            copy = copy.astype(np.int64, casting="same_kind" if copy.size else "unsafe")
        return torch.from_numpy(copy.astype(copy.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError) as error:
        held = "rows of different shapes" if copy is None else KINDS.get(copy.dtype.kind, f"type {copy.dtype}")
        expected = "an array of numbers; all its samples need one shape"
        if labels and copy is None:
            expected = f"rows of one length; pad sequences with {IGNORED}"
        elif labels:
            expected = (
                f"integer class labels; convert class names by {LABEL_ENCODING}, and whole numbers by y.astype(int)"
            )
        raise FedslrError(f"{where} holds {held}, expected {expected}") from error


def require_finite(where: str, x: Tensor) -> None:
    """Refuse inputs that are not finite in single precision, the type that models compute in."""
    if x.is_floating_point() and not bool(torch.isfinite(x.float()).all()):
        raise FedslrError(f"{where} has values that are not finite (NaN, infinity, above 3.4e38); clean the data first")


def validate_client(
    label: str, client: ClientData, input_shape: Sequence[int], num_classes: int, targets: Targets
) -> None:
    """Refuse inputs of a wrong shape, inputs that are not finite, and labels that do not match the inputs."""
    for part, x, y in client.parts():
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1:] != tuple(input_shape) or not (len(x) or part):
            expected = ", ".join(map(str, input_shape)) or "features"
            raise FedslrError(
                f"{label}: x{part} is a {type(x).__name__} of shape {list(x.shape)}, expected a tensor of shape "
                f"[samples, {expected}]; every client needs training samples, and all clients need inputs of one shape"
            )
        if wrong := targets.misfit(y, len(x), num_classes):
            raise FedslrError(f"{label}: y{part} holds labels that {wrong}")
        require_finite(f"{label}: x{part}", x)


def count_labels(clients: Sequence[ClientData], names: Sequence[str] | None) -> int:
    """Return the highest label plus 1; refuse labels that are codes, and warn of labels that never occur."""
    highest = [max((int(y.max()) for _, _, y in c.parts() if y.numel()), default=0) for c in clients]
    classes = max(highest) + 1
    label = client_label(highest.index(classes - 1), names)
    occurring = torch.cat([y.flatten() for c in clients for _, _, y in c.parts()]).unique().tolist()
    if classes > MAX_SPARSE_CLASSES and classes > MAX_CLASSES_PER_LABEL * len(occurring):
        raise FedslrError(
            f"{label}: y: the highest label is {classes - 1}, but only {len(occurring)} different labels occur; "
            f"encode C classes as labels from 0 to C − 1, for instance by {LABEL_ENCODING}"
        )
    if missing := sorted(set(range(classes)).difference(occurring)):
        listed = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        warnings.warn(
            f"y: the highest label is {classes - 1} ({label}), so fedslr counts {classes} classes, but label {listed} "
            "never occurs; number the classes from 0 without gaps if that is not intended",
            FedslrWarning,
            stacklevel=3,
        )
    return classes
