"""One client's data, and the checks that it passes before a client trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedslr.core.errors import FedslrError
from fedslr.data.arrays import require_finite

ARRAY_NAMES = ("x", "y", "x_test", "y_test")


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's inputs and labels for training and for testing. Images may be 8-bit."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def __repr__(self) -> str:
        return f"<{len(self.y)} training and {len(self.y_test)} test samples>"

    def to(self, device: torch.device, dtype: torch.dtype) -> ClientData:
        def inputs(x: Tensor) -> Tensor:
            return x.to(device, dtype) if x.is_floating_point() else x.to(device)

        return ClientData(inputs(self.x), self.y.to(device), inputs(self.x_test), self.y_test.to(device))


def client_label(index: int, names: Sequence[str] | None) -> str:
    """Return the words for a client in an error message."""
    return f"client '{names[index]}'" if names is not None and index < len(names) else f"client {index}"


def validate_client(label: str, client: ClientData, input_shape: Sequence[int], num_classes: int) -> None:
    """Refuse inputs that have another shape or are not finite, and labels that do not fit to them."""
    for part, x, y in (("", client.x, client.y), ("_test", client.x_test, client.y_test)):
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1:] != tuple(input_shape) or not (len(x) or part):
            expected = ", ".join(map(str, input_shape)) or "features"
            raise FedslrError(
                f"{label}: x{part} is a {type(x).__name__} of shape {list(x.shape)}, expected a tensor of shape "
                f"[samples, {expected}]; every client needs training samples, and all need one input shape"
            )
        lowest, highest = (int(y.min()), int(y.max())) if y.numel() else (0, 0)
        if y.dtype != torch.int64 or y.shape != x.shape[:1] or lowest < 0 or highest >= num_classes:
            raise FedslrError(
                f"{label}: y{part} holds labels from {lowest} to {highest} of shape {list(y.shape)} and type {y.dtype},"
                f" expected one label from 0 to {num_classes - 1} of type torch.int64 for each of {len(x)} samples"
            )
        require_finite(f"{label}: x{part}", x)
