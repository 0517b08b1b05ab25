"""A federation: every client with its own training and test data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedslr.core.errors import FedslrError
from fedslr.data.arrays import as_tensor
from fedslr.data.class_labels import count_classes
from fedslr.data.client_data import ARRAY_NAMES, ClientData, client_label, validate_client
from fedslr.data.normalization import UNIT, Normalization


@dataclass(frozen=True, eq=False)
class Federation:
    """Many clients whose data stays with them."""

    clients: Sequence[ClientData]
    """If the data does not fit into memory: any sequence that makes a client's data when it is indexed."""
    num_classes: int
    name: str = "arrays"
    options: Mapping[str, Any] | None = None
    """The recipe's `data` table that the federation was made from, if it was."""
    crop_padding: int = 0
    """Training images are flipped, and cropped after zero-padding by this much; 0 leaves them as they are."""
    normalization: Normalization | None = None
    """The normalization of 8-bit images when they are used; None takes inputs as they are."""
    class_names: Sequence[str] | None = None
    """The names of the classes, from class 0 on, for readers of a model's outputs."""
    client_names: Sequence[str] | None = None
    """The names of the clients, from client 0 on."""

    def __post_init__(self) -> None:
        if not self.clients:
            raise FedslrError("clients: got none, expected at least one client with x, y, x_test and y_test")
        for option, names, count, unique in (
            ("class_names", self.class_names, self.num_classes, False),
            ("client_names", self.client_names, len(self.clients), True),
        ):
            if names is not None and (len(names) != count or (unique and len(set(names)) != count)):
                raise FedslrError(f"{option}: got {len(names)} names ({len(set(names))} different), expected {count}")
        # Clients that are made when they are indexed are validated then.
        in_memory = self.clients if isinstance(self.clients, list | tuple) else [self.clients[0]]
        for i, client in enumerate(in_memory):
            validate_client(client_label(i, self.client_names), client, self.input_shape, self.num_classes)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.clients)} clients, {self.num_classes} classes, inputs {self.input_shape}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.clients[0].x.shape[1:])

    def inputs(self, x: Any) -> Tensor:
        """Return a client's `x` or `x_test` as a model gets it: 8-bit images normalised, other inputs as they are."""
        x = x if isinstance(x, Tensor) else as_tensor("x", x)
        return x if self.normalization is None else self.normalization(x, torch.float32)

    @classmethod
    def from_arrays(
        cls,
        clients: Iterable[Mapping[str, Any]],
        num_classes: int | None = None,
        name: str = "arrays",
        class_names: Sequence[str] | None = None,
        client_names: Sequence[str] | None = None,
    ) -> Federation:
        """Return a federation made from your own arrays.

        Args:
            clients: One mapping per client with the keys `x`, `y`, `x_test` and `y_test`. Arrays are numpy arrays,
                tensors or lists; the first axis counts samples, and clients may hold different numbers of them. All
                inputs have one shape. 8-bit images stay 8-bit until a batch uses them as numbers from 0 to 1. Labels
                are integers from 0.
            num_classes: The number of classes; by default that of `class_names`, or the highest label plus 1.
            name: The name of the dataset in results.
            class_names: The names of the classes, from class 0 on.
            client_names: A different name for every client; exported models carry it.
        """
        made = [_client_data(client_label(i, client_names), arrays) for i, arrays in enumerate(clients)]
        if num_classes is None:
            num_classes = count_classes(made, client_names) if made and class_names is None else len(class_names or ())
        made, eight_bit = _of_one_type(made, client_names)
        return cls(
            made,
            num_classes,
            name,
            normalization=UNIT if eight_bit else None,
            class_names=None if class_names is None else [str(name) for name in class_names],
            client_names=None if client_names is None else [str(name) for name in client_names],
        )


def _client_data(label: str, arrays: Mapping[str, Any]) -> ClientData:
    """Return one client's arrays as tensors."""
    if not isinstance(arrays, Mapping) or set(arrays) != set(ARRAY_NAMES):
        found = ", ".join(map(str, arrays)) if isinstance(arrays, Mapping) else type(arrays).__name__
        raise FedslrError(f"{label}: got {found or 'nothing'}, expected a mapping with {', '.join(ARRAY_NAMES)}")
    x, x_test = (as_tensor(f"{label}: {part}", arrays[part]) for part in ("x", "x_test"))
    y, y_test = (as_tensor(f"{label}: {part}", arrays[part], labels=True) for part in ("y", "y_test"))
    if not x_test.numel() and not y_test.numel():
        # An empty list has no input shape.
        x_test, y_test = x[:0], y[:0]
    return ClientData(x, y, x_test, y_test)


def _of_one_type(clients: Sequence[ClientData], names: Sequence[str] | None) -> tuple[list[ClientData], bool]:
    """Return clients whose inputs are all 8-bit, all integers or all floats, and whether they are 8-bit."""
    types = [{c.x.dtype, c.x_test.dtype} for c in clients]
    present = set().union(*types)
    if torch.uint8 in present and len(present) > 1:
        other = next((i for i, found in enumerate(types) if found != types[0]), 0)
        raise FedslrError(
            f"{client_label(other, names)}: x: some arrays are 8-bit, which models get as numbers from 0 to 1, and "
            "others are not; use one type for all clients"
        )
    if any(dtype.is_floating_point for dtype in present):
        clients = [replace(c, x=_as_float(c.x), x_test=_as_float(c.x_test)) for c in clients]
    return list(clients), present == {torch.uint8}


def _as_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()
