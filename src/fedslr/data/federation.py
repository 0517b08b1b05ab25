"""A federation: every client with its own training and test data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedslr.core.errors import FedslrError, FedslrWarning, suggest
from fedslr.core.targets import TARGETS, count_classes, outputs_for
from fedslr.data import frames, hold_out, map_datasets, pools, tables
from fedslr.data.client_data import (
    PAIRS,
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

    Make a federation with `fedslr.load` from a dataset, or from your own data: with `Federation.from_arrays` from the
    arrays of every client, with `from_pooled` from one pool of samples, with `from_frame` from a table, and with
    `from_datasets` from torch's or Hugging Face's datasets. Call the class itself if the data does not fit into memory.

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
    feature_names: Sequence[str] | None = None
    """The names of the inputs, for a federation that was made from a table."""
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
                    + (" different: a name for every client" if unique else ": a name for every class")
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
        labels = [y for c in self.clients for _, _, y in c.parts()]
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

    @cached_property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The numbers of training and of test samples of every client."""
        return [(len(client.y), len(client.y_test)) for client in self.clients]

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
        feature_names: Sequence[str] | None = None,
        test: float = hold_out.TEST_PART,
        validation: float = 0.0,
        seed: int = 0,
        task: str = "classification",
    ) -> Federation:
        """Return a federation made from your own arrays.

        Clients without `x_test` and `y_test` get a hold-out: by default a fifth of their samples is tested on and not
        trained on. Hold-outs are stratified by label.

        Args:
            clients: One mapping per client with the keys `x` and `y`, and optionally `x_test` and `y_test`, and `x_val`
                and `y_val`. Arrays are numpy arrays, tensors or lists. Their first axis counts samples; clients may
                hold different numbers of samples. All inputs have one shape. If all inputs are 8-bit (uint8), they stay
                8-bit in memory, and the model receives them as numbers from 0 to 1. Labels are integers from 0, or what
                `task` says.
            num_classes: The number of classes; by default the length of `class_names`, or the highest label plus 1.
            name: The name of the dataset in results.
            class_names: The names of the classes, from class 0 on.
            client_names: A different name for every client. Exported models carry the name.
            feature_names: The names of the inputs.
            test: The part of a client's samples that is held out for testing, if the client has no test samples.
            validation: The part of a client's training samples that is held out for validation, if the client has no
                validation samples.
            seed: The seed of the hold-outs.
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
        test, validation = hold_out.check_part("test", test), hold_out.check_part("validation", validation)
        integer = TARGETS[task].integer
        made = [
            hold_out.with_validation(_client_data(i, arrays, client_names, integer, test, seed), validation, seed, i)
            for i, arrays in enumerate(clients)
        ]
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
            feature_names=None if feature_names is None else [str(name) for name in feature_names],
            task=task,
        )

    @classmethod
    def from_pooled(
        cls,
        x: Any,
        y: Any,
        clients: Any = 20,
        split: str = "dirichlet",
        alpha: float = 0.1,
        classes_per_client: int = 2,
        seed: int = 0,
        **options: Any,
    ) -> Federation:
        """Return a federation made from one pool of samples. Every sample belongs to exactly one client.

        Args:
            x: The inputs of all samples.
            y: The labels of all samples: integers from 0, or texts, which become class names.
            clients: The client of every sample, as an array of names or numbers; or a number of clients, over which the
                pool is split.
            split: `"dirichlet"` draws every client's label ratio from a Dirichlet distribution; `"iid"` gives all
                clients the pool's label ratio; `"pathological"` gives a client at most `classes_per_client` classes;
                `"quantity"` draws the clients' sizes from a Dirichlet distribution. Ids in `clients` need no split.
            alpha: The concentration of the Dirichlet distribution: smaller is more skewed.
            classes_per_client: The largest number of classes of a client, for `split="pathological"`.
            seed: The seed of the split and of the hold-outs.
            **options: Other arguments of `from_arrays`, such as `test` for the part that is held out for testing.

        Returns:
            A federation that holds copies of the arrays. Values of `clients` are its clients' names.

        Raises:
            FedslrError: As in `from_arrays`; or the pool has too few samples or classes for the split.

        Example:
            federation = fedslr.Federation.from_pooled(x, y, clients=20, split="pathological", classes_per_client=2)
        """
        x = as_tensor("x", x).numpy()
        y, class_names = pools.encode_labels(pools.as_labels(y))
        pools.require_one_label_each(x, y)
        rows, names = pools.divide(y, clients, split, alpha, classes_per_client, seed)
        options = {"client_names": names, "class_names": class_names, **options}
        return cls.from_arrays([{"x": x[mine], "y": y[mine]} for mine in rows], seed=seed, **options)

    @classmethod
    def from_frame(
        cls,
        df: Any,
        target: str,
        client: Any,
        features: Sequence[str] | None = None,
        standardize: str | None = "federation",
        split: str = "dirichlet",
        alpha: float = 0.1,
        classes_per_client: int = 2,
        test: float = hold_out.TEST_PART,
        validation: float = 0.0,
        seed: int = 0,
        warn: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Federation:
        """Return a federation made from a table with one sample in every row.

        Numeric columns stay numbers. Columns of texts or categories become a 0/1 input for every category. The median
        of the training samples replaces missing numbers, and all inputs of a missing category are 0; a warning counts
        them. A part of every client's rows is held out for testing, stratified by label.

        Args:
            df: A `pandas.DataFrame`.
            target: The column of the labels: integers from 0, texts or truth values. Texts become class names.
            client: The column of the clients; or the client of every row, as an array; or a number of clients, over
                which the rows are split as in `from_pooled`.
            features: The columns of the inputs; by default all other columns.
            standardize: Whose training samples give the mean and the standard deviation of a numeric column:
                `"federation"` for those of all clients, `"client"` for each client's own; `None` leaves numbers as they
                are.
            split: The split over a number of clients, with `alpha` and `classes_per_client`, as in `from_pooled`.
            alpha: The concentration of the Dirichlet distribution.
            classes_per_client: The largest number of classes of a client.
            test: The part of a client's rows that is held out for testing.
            validation: The part of a client's training rows that is held out for validation.
            seed: The seed of the split and of the hold-outs.
            warn: A function that is called with the text of every warning; by default `warnings.warn`.
            **options: Other arguments of `from_arrays`, such as `name`.

        Returns:
            A federation whose `feature_names` are the names of the inputs, such as `age` and `chest pain=typical`.

        Raises:
            FedslrError: A column is missing, the target or the client of a row is missing, a column holds dates or too
                many categories, or the split is impossible.

        Example:
            federation = fedslr.Federation.from_frame(df, target="disease", client="hospital")
        """
        warn = warn or (lambda text: warnings.warn(text, FedslrWarning, stacklevel=4))
        y, class_names = pools.encode_labels(frames.complete_column(df, target, "target"))
        ids = frames.complete_column(df, client, "client") if isinstance(client, str) else client
        columns = frames.feature_columns(df, features, (target, client) if isinstance(client, str) else (target,))
        rows, names = pools.divide(y, ids, split, alpha, classes_per_client, seed)
        clients, feature_names = tables.table_clients(columns, y, rows, standardize, test, validation, seed, warn)
        options = {"client_names": names, "class_names": class_names, "name": "table", **options}
        return cls.from_arrays(clients, feature_names=feature_names, **options)

    @classmethod
    def from_datasets(
        cls,
        train: Sequence[Any],
        test: Sequence[Any] | None = None,
        columns: Sequence[str] | None = None,
        **options: Any,
    ) -> Federation:
        """Return a federation made from map-style datasets, as torch and Hugging Face have them.

        A dataset has a length and an index. A sample is a pair of an input and a label, or a mapping with two columns.
        All samples are read at once; images of Pillow become arrays with their channels first.

        Args:
            train: The training dataset of every client.
            test: The test dataset of every client; by default a fifth of every training dataset is held out.
            columns: The names of the input and of the label of a sample that is a mapping. By default the label is
                `label`, `labels`, `target` or `y`, and the input is the only other column.
            **options: Other arguments of `from_arrays`, such as `client_names`, `validation` and `seed`.

        Returns:
            A federation that holds copies of the samples.

        Raises:
            FedslrError: As in `from_arrays`; or a dataset has no length, is empty, or has samples of another form.

        Example:
            federation = fedslr.Federation.from_datasets([north, south], test=[north_test, south_test])
        """
        clients = map_datasets.read_clients(train, test, columns, options.get("client_names"))
        return cls.from_arrays(clients, **options)


def _count(clients: Sequence[ClientData], names: Sequence[str] | None, task: str) -> int:
    """Return the number of classes, labels or targets that occur."""
    if task == "classification":
        return count_labels(clients, names)
    return count_classes(task, [y for c in clients for _, _, y in c.parts()])


def _client_data(
    client: int, arrays: Mapping[str, Any], names: Sequence[str] | None, integer: bool, test: float, seed: int
) -> ClientData:
    """Return one client's arrays as tensors; hold out test samples if there are none."""
    label = client_label(client, names)
    keys = set(arrays) if isinstance(arrays, Mapping) else set()
    wanted = [name for pair in PAIRS if "x" in pair or keys.intersection(pair) for name in pair]
    if keys != set(wanted):
        listed = ", ".join(map(str, arrays)) if isinstance(arrays, Mapping) else ""
        given = f"a mapping with {listed or 'no keys'}" if isinstance(arrays, Mapping) else f"a {type(arrays).__name__}"
        raise FedslrError(
            f"{label}: got {given}, expected a mapping with x and y for every client, and optionally x_test and "
            "y_test, or x_val and y_val; without test data, x_test and y_test are empty lists"
        )
    found = {name: as_tensor(f"{label}: {name}", arrays[name], integer and name.startswith("y")) for name in wanted}
    if not integer:
        found |= {name: _as_float(found[name]) for name in wanted if name.startswith("y")}
    x, y = found["x"], found["y"]
    for x_name, y_name in PAIRS:
        if x_name in found and not found[x_name].numel() and not found[y_name].numel():
            # An empty list has no input shape.
            found |= {x_name: x[:0], y_name: y[:0]}
    data = ClientData(**{"x_test": x, "y_test": y, **found})
    return data if "x_test" in found else hold_out.with_test(data, test, seed, client)


def _of_one_type(clients: Sequence[ClientData], names: Sequence[str] | None) -> tuple[list[ClientData], bool]:
    """Return clients whose inputs are all 8-bit, all integers or all floats, and whether all are 8-bit."""
    types = [{x.dtype for _, x, _ in c.parts()} for c in clients]
    present = set().union(*types)
    if torch.uint8 in present and len(present) > 1:
        other = next((i for i, found in enumerate(types) if found != types[0]), 0)
        raise FedslrError(
            f"{client_label(other, names)}: x: some clients' arrays are 8-bit, which models receive as numbers from 0 "
            "to 1, and others are not; use one type for all clients"
        )
    if any(dtype.is_floating_point for dtype in present):
        clients = [replace(c, **{f"x{part}": _as_float(x) for part, x, _ in c.parts()}) for c in clients]
    return list(clients), present == {torch.uint8}


def _as_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()
