"""A federation: every client with its own training and test data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedslr.core.errors import FedslrError, suggest
from fedslr.core.targets import TARGETS, count_classes, outputs_for
from fedslr.data.client_data import (
    ARRAY_NAMES,
    ClientData,
    as_tensor,
    client_label,
    count_labels,
    validate_client,
)
from fedslr.data.normalization import UNIT, Normalization, inputs


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of all clients: each client has its own training and test samples.

    Make a federation with `fedslr.load` from a dataset, or with `Federation.from_arrays` from your own arrays. Call the
    class itself if the data does not fit into memory.

    Raises:
        FedslrError: There are no clients, `class_names` or `client_names` have a wrong length, or a client's data has a
            wrong shape or type or is not finite.
    """

    clients: Sequence[ClientData]
    """The clients' data. A list or tuple is validated at once. Any other sequence may read or generate a client's data
    whenever the client is indexed, and is validated then."""
    num_classes: int
    """The number of classes; of labels in a multilabel task, and of targets in a regression."""
    name: str = "arrays"
    """The name of the dataset in results."""
    options: Mapping[str, Any] | None = None
    """The recipe's `data` table, for a federation that was made from one."""
    crop_padding: int = 0
    """Zero pixels around a training image before it is cropped at random; 0 disables flips and crops."""
    normalization: Normalization | None = None
    """The normalization of 8-bit images when a batch uses them; None leaves inputs as they are."""
    class_names: Sequence[str] | None = None
    """The names of the classes, from class 0 on, for readers of a model's outputs."""
    client_names: Sequence[str] | None = None
    """The names of the clients, from client 0 on."""
    task: str = "classification"
    """The task that the labels are for."""

    def __post_init__(self) -> None:
        if not self.clients:
            raise FedslrError("clients: got none, expected at least one client with x, y, x_test and y_test")
        for option, names, count, unique in (
            ("class_names", self.class_names, self.num_classes, False),
            ("client_names", self.client_names, len(self.clients), True),
        ):
            if names is not None and (len(names) != count or (unique and len(set(names)) != count)):
                raise FedslrError(
                    f"{option}: got {len(names)} names, {len(set(names))} of them different; expected {count}"
                    + (" different names" if unique else " names")
                )
        in_memory = self.clients if isinstance(self.clients, list | tuple) else [self.clients[0]]
        for i, client in enumerate(in_memory):
            self.validate(i, client)

    def validate(self, number: int, client: ClientData) -> None:
        """Refuse a client's data that do not fit the federation."""
        label = client_label(number, self.client_names)
        validate_client(label, client, self.input_shape, self.num_classes, TARGETS[self.task])

    def for_task(self, task: str) -> Federation:
        """Return the federation for a task that its labels suit."""
        if task == self.task:
            return self
        if task not in TARGETS:
            raise FedslrError(f"task: got '{task}', no such task; {suggest(task, TARGETS)}")
        labels = [y for c in self.clients for y in (c.y, c.y_test)]
        return replace(self, task=task, num_classes=count_classes(task, labels))

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.clients)} clients, {self.num_classes} classes, inputs {self.input_shape}>"

    @property
    def outputs(self) -> int:
        """The number of outputs that a model needs per sample, or per token of a sequence."""
        return outputs_for(self.task, self.num_classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.clients[0].x.shape[1:])

    def inputs(self, x: Any) -> Tensor:
        """Return a client's `x` or `x_test` as the model receives it.

        Args:
            x: Inputs of one client: a tensor, a numpy array or a list.

        Returns:
            Normalised images if the federation holds 8-bit images; any other inputs as they are.
        """
        return inputs(x if isinstance(x, Tensor) else as_tensor("x", x), self.normalization, torch.float32)

    @classmethod
    def from_arrays(
        cls,
        clients: Iterable[Mapping[str, Any]],
        num_classes: int | None = None,
        name: str = "arrays",
        class_names: Sequence[str] | None = None,
        client_names: Sequence[str] | None = None,
        task: str = "classification",
    ) -> Federation:
        """Return a federation made from your own arrays.

        Args:
            clients: One mapping per client with the keys `x`, `y`, `x_test` and `y_test`. Arrays are numpy arrays,
                tensors or lists. Their first axis counts samples; clients may hold different numbers of samples. All
                inputs have one shape. If all inputs are 8-bit (uint8), they stay 8-bit in memory, and the model
                receives them as numbers from 0 to 1. Labels are integers from 0, or what `task` says.
            num_classes: The number of classes; by default the length of `class_names`, or the highest label plus 1.
            name: The name of the dataset in results.
            class_names: The names of the classes, from class 0 on.
            client_names: A different name for every client. Exported models carry the name.
            task: The kind of labels: `classification` (integers from 0), `binary` (0 and 1), `multilabel` (rows of 0
                and 1), `regression` (numbers, or rows of numbers), or `sequence` (a row of integers per sample, one
                for each token, and −100 where there is none).

        Returns:
            A federation that holds copies of the arrays.

        Raises:
            FedslrError: There are no clients, an array is missing, has a wrong shape or type or is not finite, a label
                is out of range, or the names do not match the classes or the clients.

        Example:
            wards = [{"x": x, "y": y, "x_test": x_test, "y_test": y_test} for x, y, x_test, y_test in measurements]
            federation = fedslr.Federation.from_arrays(wards, client_names=["north", "south"])
        """
        if task not in TARGETS:
            raise FedslrError(f"task: got '{task}', no such task; {suggest(task, TARGETS)}")
        integer = TARGETS[task].integer
        made = [_client_data(client_label(i, client_names), arrays, integer) for i, arrays in enumerate(clients)]
        if num_classes is None:
            num_classes = _count(made, client_names, task) if made and class_names is None else len(class_names or ())
        made, eight_bit = _of_one_type(made, client_names)
        return cls(
            made,
            num_classes,
            name,
            normalization=UNIT if eight_bit else None,
            class_names=None if class_names is None else [str(name) for name in class_names],
            client_names=None if client_names is None else [str(name) for name in client_names],
            task=task,
        )


def _count(clients: Sequence[ClientData], names: Sequence[str] | None, task: str) -> int:
    """Return the number of classes, labels or targets that occur."""
    if task == "classification":
        return count_labels(clients, names)
    return count_classes(task, [y for c in clients for y in (c.y, c.y_test)])


def _client_data(label: str, arrays: Mapping[str, Any], integer: bool = True) -> ClientData:
    """Return one client's arrays as tensors."""
    if not isinstance(arrays, Mapping) or set(arrays) != set(ARRAY_NAMES):
        found = ", ".join(map(str, arrays)) if isinstance(arrays, Mapping) else type(arrays).__name__
        raise FedslrError(f"{label}: got {found or 'nothing'}, expected a mapping with {', '.join(ARRAY_NAMES)}")
    x, x_test = (as_tensor(f"{label}: {part}", arrays[part]) for part in ("x", "x_test"))
    y, y_test = (as_tensor(f"{label}: {part}", arrays[part], labels=integer) for part in ("y", "y_test"))
    if not integer:
        y, y_test = (_as_float(part) for part in (y, y_test))
    if not x_test.numel() and not y_test.numel():
        # An empty list has no input shape.
        x_test, y_test = x[:0], y[:0]
    return ClientData(x, y, x_test, y_test)


def _of_one_type(clients: Sequence[ClientData], names: Sequence[str] | None) -> tuple[list[ClientData], bool]:
    """Return clients whose inputs are all 8-bit, all integers or all floats, and whether all are 8-bit."""
    types = [{c.x.dtype, c.x_test.dtype} for c in clients]
    present = set().union(*types)
    if torch.uint8 in present and len(present) > 1:
        other = next((i for i, found in enumerate(types) if found != types[0]), 0)
        raise FedslrError(
            f"{client_label(other, names)}: x: some clients' arrays are 8-bit, which models receive as numbers from 0 "
            "to 1, and others are not; use one type for all clients"
        )
    if any(dtype.is_floating_point for dtype in present):
        clients = [replace(c, x=_as_float(c.x), x_test=_as_float(c.x_test)) for c in clients]
    return list(clients), present == {torch.uint8}


def _as_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


class ClientsOnDevice(Sequence[ClientData]):
    """Clients whose data is read, validated and sent to a device whenever it is used."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        self.federation, self.device, self.dtype = federation, device, dtype
        self.input_shape = federation.input_shape

    def __len__(self) -> int:
        return len(self.federation.clients)

    def __getitem__(self, client: Any) -> Any:
        data = self.federation.clients[client]
        self.federation.validate(client, data)
        return data.to(self.device, self.dtype)


def clients_on_device(federation: Federation, device: torch.device, dtype: torch.dtype) -> Sequence[ClientData]:
    """Return a federation's clients on a device: at once if they are in memory, otherwise when they are used."""
    if isinstance(federation.clients, list | tuple):
        return [c.to(device, dtype) for c in federation.clients]
    return ClientsOnDevice(federation, device, dtype)
