"""A federation: every client with its own training and test data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedslr.core import schema
from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.core.schema import countable
from fedslr.data.normalization import UNIT, Normalization

PARTS = ("x", "y", "x_test", "y_test")
MANY_CLASSES, PER_LABEL = 100, 20
"""More classes than this, and more than so many for every label that occurs, are taken for labels that do not count
from 0, or for one that went wrong."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data: inputs and labels to train on and to be tested on. Images may be 8-bit."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def __post_init__(self) -> None:
        for part in PARTS:
            if not isinstance(getattr(self, part), Tensor):
                got = type(getattr(self, part)).__name__
                raise FedslrError(f"{part}: got a {got}, expected a tensor (Federation.from_arrays takes any array)")
        for x, y, part in ((self.x, self.y, "y"), (self.x_test, self.y_test, "y_test")):
            if y.dtype != torch.int64 or y.shape != x.shape[:1]:
                got = f"{list(y.shape)} of {str(y.dtype).removeprefix('torch.')} for {list(x.shape)}"
                raise FedslrError(f"{part}: got {got}, expected one int64 label for every sample")

    def __repr__(self) -> str:
        return f"<{len(self.y)} training and {len(self.y_test)} test samples>"

    def to(self, device: torch.device, dtype: torch.dtype) -> ClientData:
        def inputs(x: Tensor) -> Tensor:
            return x.to(device, dtype) if x.is_floating_point() else x.to(device)

        return ClientData(inputs(self.x), self.y.to(device), inputs(self.x_test), self.y_test.to(device))


class Placed(Sequence[ClientData]):
    """Clients whose data are put on a device when they are used, and looked at then."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype) -> None:
        self.federation, self.device, self.dtype = federation, device, dtype
        self.shape = federation.input_shape

    def __len__(self) -> int:
        return len(self.federation.clients)

    def __getitem__(self, client: Any) -> Any:
        made = self.federation.clients[client]
        _require_alike(client, made, self.shape, self.federation.num_classes)
        for part in ("x", "x_test"):
            require_finite(f"client {client}: {part}", getattr(made, part))
        return made.to(self.device, self.dtype)


def placed(federation: Federation, device: torch.device, dtype: torch.dtype) -> Sequence[ClientData]:
    """A list of clients on a device for good; clients that another sequence makes when asked, when they are used."""
    if isinstance(federation.clients, list | tuple):
        return [c.to(device, dtype) for c in federation.clients]
    return Placed(federation, device, dtype)


def _require_alike(index: int, client: ClientData, shape: Sequence[int], classes: int) -> None:
    """Refuse a client whose data are of another shape, or whose labels are none."""
    if not isinstance(client, ClientData):
        raise FedslrError(f"client {index}: got a {type(client).__name__}, expected fedslr.ClientData")
    if not len(client.x):
        raise FedslrError(f"client {index}: x is empty; leave out clients without training data")
    for part, x in (("x", client.x), ("x_test", client.x_test)):
        if tuple(x.shape[1:]) != tuple(shape):
            raise FedslrError(
                f"client {index}: {part} holds inputs of shape {list(x.shape[1:])}, client 0 of {list(shape)}; "
                "all clients must share one input shape"
            )
    for part, y in (("y", client.y), ("y_test", client.y_test)):
        if len(y) and (int(y.min()) < 0 or int(y.max()) >= classes):
            wrong = int(y.min()) if int(y.min()) < 0 else int(y.max())
            raise FedslrError(f"client {index}: {part} has label {wrong}, expected 0 to {classes - 1}")


@dataclass(frozen=True, eq=False)
class Federation:
    """Many clients whose data stay with them."""

    clients: Sequence[ClientData]
    """Where they are too many for memory, any sequence that makes a client's data when asked for it."""
    num_classes: int
    name: str = "arrays"
    options: Mapping[str, Any] | None = None
    """How it was made, where a dataset was shared out: a recipe's `data` table."""
    crop_padding: int = 0
    """Training images are flipped, and cropped after zero-padding by this much; 0 leaves them as they are."""
    normalization: Normalization | None = None
    """How 8-bit images become numbers when they are used; None takes inputs as they are."""
    class_names: Sequence[str] | None = None
    """What the classes are called, from class 0 on: for the people who will read a model's answers."""
    client_names: Sequence[str] | None = None
    """What the clients are called, from client 0 on: for the people who will be sent their models."""

    def __post_init__(self) -> None:
        if not self.clients:
            raise FedslrError("clients: got none, expected at least one client with x, y, x_test and y_test")
        first = self.clients[0]
        shape = first.x.shape[1:] if isinstance(first, ClientData) else ()
        # Clients that are made when they are asked for are looked at then.
        known = self.clients if isinstance(self.clients, list | tuple) else [first]
        for i, client in enumerate(known):
            _require_alike(i, client, shape, self.num_classes)
        if self.class_names is not None:
            _require_names(self.class_names, self.num_classes)
        if self.client_names is not None:
            _require_texts("client_names", self.client_names)
            if len(set(self.client_names)) != len(self.clients) or len(self.client_names) != len(self.clients):
                raise FedslrError(
                    f"client_names: got {len(self.client_names)} for {len(self.clients)} clients; expected a different "
                    "one for each, or None"
                )
        if self.crop_padding and len(shape) != 3:
            raise FedslrError(
                f"crop_padding: got {self.crop_padding}, but inputs of shape {list(shape)}; only images (channels, "
                "height, width) are cropped, expected 0"
            )

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.clients)} clients, {self.num_classes} classes, inputs {self.input_shape}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.clients[0].x.shape[1:])

    def inputs(self, x: Any) -> Tensor:
        """A client's `x` or `x_test` as models are given it: 8-bit images as normalised numbers, all else as it is."""
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
        """A federation from your own arrays: one mapping per client with `x`, `y`, `x_test` and `y_test`.

        Arrays are numpy arrays, tensors or lists; the first axis counts samples, and clients may hold different numbers
        of them. Inputs of all clients have one shape; 8-bit images stay as they are until they are
        used, as numbers from 0 to 1. Labels are whole numbers from 0; their number of classes is taken from the data
        unless it, or what the classes are called, is given. Names of clients go with the models that are exported.
        """
        if not isinstance(clients, Iterable):
            raise FedslrError(f"clients: got a {type(clients).__name__}, expected one mapping of arrays per client")
        num_classes = schema.check_value("num_classes", num_classes, Annotated[int | None, countable])
        made = [_client(i, arrays) for i, arrays in enumerate(clients)]
        if not made:
            return cls(made, 0, name)
        kinds = {x.dtype for c in made for x in (c.x, c.x_test)}
        eight_bit = kinds == {torch.uint8}
        if torch.uint8 in kinds and not eight_bit:
            is_so = [{x.dtype == torch.uint8 for x in (c.x, c.x_test)} for c in made]
            other = next((i for i, kind in enumerate(is_so) if kind != is_so[0]), 0)
            raise FedslrError(
                f"client {other}: x: some arrays are 8-bit, which are used as numbers from 0 to 1, and others are not; "
                "expected one kind"
            )
        if any(kind.is_floating_point for kind in kinds):
            made = [replace(c, x=_as_float(c.x), x_test=_as_float(c.x_test)) for c in made]
        if num_classes is None and class_names is not None:
            _require_names(class_names)
            highest = max(int(y.max()) for c in made for y in (c.y, c.y_test) if len(y))
            num_classes = max(len(class_names), highest + 1)
        classes = num_classes if num_classes is not None else _count_classes(made)
        return cls(
            made,
            classes,
            name,
            normalization=UNIT if eight_bit else None,
            class_names=class_names,
            client_names=client_names,
        )


def _require_texts(option: str, names: Any) -> None:
    listed = isinstance(names, Sequence | np.ndarray) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) for name in names):
        whose = "class" if option == "class_names" else "client"
        raise FedslrError(f"{option}: expected a list of texts, one for every {whose}")


def _require_names(names: Any, classes: int | None = None) -> None:
    _require_texts("class_names", names)
    if classes is not None and len(names) != classes:
        raise FedslrError(f"class_names: got {len(names)}, but there are {classes} classes; expected one for each")


def _count_classes(clients: Sequence[ClientData]) -> int:
    """As many as the highest label says; labels that are codes, and not numbers of classes, would fill the memory."""
    highest = [max(int(y.max()) for y in (c.y, c.y_test) if len(y)) for c in clients]
    classes, learnt = max(highest) + 1, set(torch.cat([c.y for c in clients]).unique().tolist())
    occur = learnt | set(torch.cat([c.y_test for c in clients]).unique().tolist())
    if classes > MANY_CLASSES and classes > PER_LABEL * len(occur):
        raise FedslrError(
            f"client {highest.index(classes - 1)}: y: the highest label is {classes - 1}, but only {len(occur)} "
            f"different ones occur; expected labels from 0 to C − 1 for C classes, {CODED}, or num_classes"
        )
    if min(occur) == 1:
        _tell(
            f"y: labels go from 1 to {classes - 1}, so that there are {classes} classes, and 0 is one that never "
            "occurs; give y - 1, or num_classes if that is meant"
        )
    elif missing := sorted(set(range(classes)) - occur):
        _tell(
            f"y: labels go up to {classes - 1} (client {highest.index(classes - 1)}), so that there are {classes} "
            f"classes, and {_listed(missing)} of them never occur; give labels from 0 on without gaps, or "
            "num_classes if that is meant"
        )
    elif strange := sorted(occur - learnt):
        _tell(f"y_test: nobody has training data of {_listed(strange)}, which some are tested on")
    return classes


def _tell(text: str) -> None:
    warnings.warn(text, FedslrWarning, stacklevel=4)


def _listed(labels: Sequence[int]) -> str:
    return ", ".join(map(str, labels[:5])) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")


def _client(index: int, arrays: Mapping[str, Any]) -> ClientData:
    """One client's arrays as tensors, checked."""
    if not isinstance(arrays, Mapping):
        raise FedslrError(f"client {index}: got a {type(arrays).__name__}, expected a mapping with {', '.join(PARTS)}")
    if missing := [part for part in PARTS if part not in arrays]:
        raise FedslrError(f"client {index}: {missing[0]} is missing; every client needs {', '.join(PARTS)}")
    if unknown := [part for part in arrays if part not in PARTS]:
        raise FedslrError(f"client {index}: unknown part '{unknown[0]}'; every client has {', '.join(PARTS)}")
    tensors = {part: as_tensor(f"client {index}: {part}", arrays[part]) for part in PARTS}
    if not tensors["x_test"].numel() and not tensors["y_test"].numel():
        tensors["x_test"], tensors["y_test"] = tensors["x"][:0], tensors["y"][:0]
    for inputs, labels in (("x", "y"), ("x_test", "y_test")):
        x, y = tensors[inputs], tensors[labels]
        where = f"client {index}: {inputs}"
        if x.ndim < 2:
            raise FedslrError(f"{where} has {x.ndim} axes, expected samples first and at least one axis of features")
        if y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
            found = f"{y.ndim} axes of {str(y.dtype).removeprefix('torch.')}"
            raise FedslrError(f"client {index}: {labels} must be one axis of whole-number labels, got {found}; {CODED}")
        if len(x) != len(y):
            raise FedslrError(f"{where} has {len(x)} samples but {labels} has {len(y)} labels")
        require_finite(where, x)
        tensors[labels] = y.long()
    if len(tensors["x"]) == 0:
        raise FedslrError(f"client {index}: x is empty; leave out clients without training data")
    return ClientData(**tensors)


def require_finite(where: str, x: Tensor) -> None:
    """Refuse inputs that are no finite numbers in single precision, which is what models are given."""
    if x.is_floating_point() and not bool(torch.isfinite(x.float()).all()):
        raise FedslrError(f"{where} has numbers that are not finite (NaN, infinity, above 3.4e38); clean them first")


CODED = "such as numpy.searchsorted(names, y) with one sorted list of all classes for all clients"
"""How labels of any kind become whole numbers from 0, the same everywhere."""


def _from_numpy(array: np.ndarray[Any, Any], labels: bool) -> Tensor:
    if array.dtype.kind not in "biuf":
        coded = f"; expected whole numbers, {CODED}" if labels else ""
        raise TypeError(f"its entries are of type {array.dtype}{coded}")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _as_float(x: Tensor) -> Tensor:
    """Whole numbers beside another client's floats."""
    return x if x.is_floating_point() else x.float()


def as_tensor(where: str, array: Any) -> Tensor:
    """An array of numbers of any kind as a tensor; others are refused."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise FedslrError(f"{where} is a masked array, {int(array.mask.sum())} entries of it masked; fill them first")
    try:
        labels = where.split()[-1].startswith("y")
        made = array.detach().clone() if isinstance(array, Tensor) else _from_numpy(np.array(array), labels)
        if made.layout != torch.strided or made.is_complex():
            raise TypeError("sparse and complex tensors are not taken")
        return made
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedslrError(f"{where} is no array of numbers: {error}".split("\n")[0]) from error
