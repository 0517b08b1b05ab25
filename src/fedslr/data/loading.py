"""The data options of a recipe, and the federation that they describe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fedslr.core import plugins, schema, seeds
from fedslr.core.errors import FedslrError, suggest
from fedslr.core.schema import countable, one_of, seed_range
from fedslr.data import frames, hold_out, partitions, tables
from fedslr.data.cifar import cifar10, cifar100
from fedslr.data.client_data import ClientData
from fedslr.data.dataset import Dataset
from fedslr.data.diabetes import diabetes
from fedslr.data.digits import digits
from fedslr.data.federation import Federation
from fedslr.data.femnist import femnist
from fedslr.data.image_folder import image_folder
from fedslr.data.npz_files import npz_federation
from fedslr.data.tinyimagenet import tinyimagenet
from fedslr.data.uci_heart import heart

Warn = Callable[[str], None]

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tinyimagenet": tinyimagenet,
    "diabetes": diabetes,
}
"""Pooled datasets by name, which fedslr partitions over clients."""

PARTITIONED_DATASETS = ("femnist", "heart")
"""Datasets by name that are already partitioned by client."""

DATASET_TASKS = {"diabetes": "regression"}
"""The tasks of datasets by name, where they are not classifications."""

POOL_OPTIONS = ("reuse", "samples_per_client", "test_samples")
"""The options that only the partition of a pooled dataset uses."""
SPLIT_OPTIONS = ("split", "alpha", "classes_per_client")
"""The options that the partition of a pooled dataset and of a table without clients uses."""
TABLE_OPTIONS = ("target", "client", "features", "standardize")
"""The options that only tables use."""
KINDS = ("imagefolder", "npz", "table")
"""The kinds of a user's files, which stand before their path in `data.name`."""


@dataclass(frozen=True)
class DataOptions:
    """The dataset and its partition: a recipe's `data` table, and the keywords of `fedslr.load`."""

    name: Annotated[
        str,
        f"{', '.join([*DATASETS, *PARTITIONED_DATASETS])}, imagefolder:PATH, npz:PATH, table:PATH, or your own "
        "module:function",
    ] = "digits"
    root: Annotated[str, "folder that datasets were unpacked to; digits needs none"] = "data"
    clients: Annotated[int, countable, "number of clients M"] = 100
    split: Annotated[
        str, one_of("iid", "dirichlet", "authors", "pathological", "quantity"), "distribution over clients"
    ] = "dirichlet"
    alpha: partitions.Alpha = 0.1
    reuse: Annotated[bool, "reuse the samples of a class that has run out, as in the authors' code"] = False
    samples_per_client: Annotated[int | None, countable, "training samples of every client"] = None
    test_samples: Annotated[int | None, countable, "test samples of every client"] = None
    augment: Annotated[bool, "random flips and crops of training images, for datasets that define them"] = True
    seed: Annotated[int | None, seed_range, "seed of the split; the run's seed unless given"] = None
    # Options without a default are left out of config.toml, so that older runs can be resumed.
    classes_per_client: Annotated[
        int | None, countable, "largest number of classes of a client for split = 'pathological'; 2 unless given"
    ] = None
    test: Annotated[
        float | None, hold_out.below_one, "part held out for testing, for data without test samples; 0.2 unless given"
    ] = None
    validation: Annotated[
        float | None, hold_out.below_one, "part of the training samples held out for validation; 0 unless given"
    ] = None
    target: Annotated[str | None, "column of the labels of a table"] = None
    client: Annotated[str | None, "column of the clients of a table"] = None
    features: Annotated[tuple[str, ...] | None, "columns of the inputs of a table; all others unless given"] = None
    standardize: Annotated[
        str | None, tables.scopes, "whose training data standardise a table's numbers; federation unless given"
    ] = None

    def __post_init__(self) -> None:
        kind, path = self._kind_and_path()
        named = self.name in DATASETS or self.name in PARTITIONED_DATASETS or plugins.is_name(self.name)
        if not (named or (kind in KINDS and path)):
            names = [*DATASETS, *PARTITIONED_DATASETS, *(f"{kind}:PATH" for kind in KINDS), "module:function"]
            raise FedslrError(f"data.name: got '{self.name}', no such dataset; {suggest(self.name, names)}")
        if kind == "table" and self.target is None:
            raise FedslrError(f"data.target: '{self.name}' needs the column of the labels, such as target = 'disease'")

    def _kind_and_path(self) -> tuple[str, str]:
        kind, _, path = self.name.partition(":")
        return kind, path

    def task(self) -> str:
        """Return the task of the dataset's labels; for your own data, classification unless a recipe says otherwise."""
        return DATASET_TASKS.get(self.name, "classification")

    def pooled(self) -> Dataset | None:
        """Return the dataset before its partition, or None if the data is already partitioned by client."""
        kind, path = self._kind_and_path()
        if kind == "imagefolder":
            return image_folder(Path(path))
        return DATASETS[self.name](Path(self.root)) if self.name in DATASETS else None

    def partitioned(self, task: str, warn: Warn) -> Federation:
        """Return the federation of data that comes by client, or of a table."""
        kind, path = self._kind_and_path()
        if kind == "npz":
            return npz_federation(Path(path), task)
        if kind == "table":
            return self._table(Path(path), task, warn)
        if self.name == "heart":
            return heart(**self._given("test", "validation", "standardize", "seed"), warn=warn)
        if self.name == "femnist":
            return femnist(Path(self.root))
        made = plugins.function("data.name", self.name)()
        if isinstance(made, Federation):
            return made
        return Federation.from_arrays(made, name=self.name, task=task, **self._given("test", "validation", "seed"))

    def _table(self, path: Path, task: str, warn: Warn) -> Federation:
        frame, files = frames.read_tables(path)
        clients = self.client or (self.clients if files is None else files)
        options = self._given("features", "standardize", *SPLIT_OPTIONS, "test", "validation", "seed")
        return Federation.from_frame(frame, str(self.target), clients, **options, name=path.stem, task=task, warn=warn)

    def _given(self, *names: str) -> dict[str, Any]:
        """Return the options among these that have a value."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def uses(self) -> tuple[str, ...]:
        """Return the optional options that this kind of data uses."""
        kind = self.name if self.name == "heart" else self._kind_and_path()[0]
        if kind == "table":
            return (*TABLE_OPTIONS, "test", *(() if self.client else SPLIT_OPTIONS))
        if kind in (*DATASETS, "imagefolder"):
            return (*POOL_OPTIONS, *SPLIT_OPTIONS)
        return {"heart": ("standardize", "test"), "npz": (), "femnist": ()}.get(kind, ("test",))


def load(name: str = "digits", *, task: str | None = None, warn: Warn | None = None, **options: Any) -> Federation:
    """Return a federation made from a dataset.

    A pooled dataset is partitioned over clients. Every client's test set has the label ratio of its training set. Data
    that is already partitioned by client keeps its partition.

    Args:
        name: `digits`, `cifar10`, `cifar100`, `tinyimagenet`, `diabetes`, `femnist`, `heart`, `imagefolder:PATH`,
            `npz:PATH`, `table:PATH`, or `module:function` of your own, which returns a `Federation` or what
            `Federation.from_arrays` takes.
        task: The task that the labels are for, see `Federation.from_arrays`; by default the dataset's own.
        warn: A function that is called with the text of every warning; by default `warnings.warn`.
        **options: The keys of a recipe's `data` table:

            - `root`: The folder that datasets were unpacked to (default `"data"`). `digits` needs none.
            - `clients`: The number of clients (default 100). Of data that is already partitioned, the first `clients`
              clients are taken.
            - `split`: The distribution over clients: `"dirichlet"` (default) and `"iid"` for labels; `"pathological"`
              for a few classes per client; `"quantity"` for sizes drawn from a Dirichlet distribution; or `"authors"`,
              the partition of the FedSLR authors' code.
            - `alpha`: The concentration of the Dirichlet distribution (default 0.1): smaller is more skewed.
            - `classes_per_client`: The largest number of classes of a client (default 2), for
              `split="pathological"`.
            - `reuse`: Whether a class that has run out starts again, as in the authors' code (default `False`).
            - `samples_per_client`: Training samples of every client; by default all samples are used.
            - `test_samples`: Test samples of every client; the default depends on the dataset.
            - `augment`: Whether training images are flipped and cropped at random, for datasets that define it
              (default `True`).
            - `seed`: The seed of the partition and of hold-outs (default 0).
            - `test`: The part of a client's samples that is held out for testing (default 0.2), for `heart`, tables and
              functions of your own without test samples.
            - `validation`: The part of a client's training samples that is held out for validation (default 0).
            - `target`, `client`, `features`, `standardize`: The columns of a table, as in `Federation.from_frame`.

    Returns:
        The federation. Its data lies in memory or is mapped from the disk.

    Raises:
        FedslrError: The name or an option is unknown, a value is out of range, the dataset is missing or damaged, or it
            has too few samples for this many clients.

    Example:
        federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)
        result = fedslr.run(fedslr.FedSLR(), federation, model="cnn", rounds=30)
    """
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    checked = schema.build(DataOptions, {"name": name, "seed": 0, **plain}, "data")
    told: list[str] = []
    federation = build_federation(checked, warn or told.append, task)
    for text in told:
        warnings.warn(text, stacklevel=2)
    return federation


def decode_to_cache(options: DataOptions) -> None:
    """Decode a dataset to its cache, before several processes need it at once."""
    if options.pooled() is None and options.name in PARTITIONED_DATASETS:
        options.partitioned(options.task(), lambda text: None)


def build_federation(options: DataOptions, warn: Warn = lambda text: None, task: str | None = None) -> Federation:
    """Return the federation that data options describe, for a task: by default that of the dataset.

    Of data that is already partitioned, the first `options.clients` clients are taken.
    """
    data, task = options.pooled(), task or options.task()
    federation = _take_clients(options, task, warn) if data is None else _split(options, data)
    _warn_of_ignored_options(options, warn)
    return federation.for_task(task)


def _take_clients(options: DataOptions, task: str, warn: Warn) -> Federation:
    """Return the first clients of data that is already partitioned, or the clients of a table."""
    found = options.partitioned(task, warn)
    _warn_of_client_count(options, len(found.clients), warn)
    names = None if found.client_names is None else found.client_names[: options.clients]
    clients = _with_validation(options, found.clients[: options.clients])
    return replace(found, clients=clients, client_names=names, options=asdict(options))


def _split(options: DataOptions, data: Dataset) -> Federation:
    """Return the federation of a pooled dataset."""
    test_samples = options.test_samples or data.test_samples
    clients = [data.client(train, test) for train, test in _partition(options, data, test_samples)]
    if not any(len(c.y_test) for c in clients):
        raise FedslrError(
            f"data.test_samples: got {test_samples}, too few for test sets with the clients' label ratios: all test "
            "sets are empty; choose more"
        )
    return Federation(
        _with_validation(options, clients),
        data.num_classes,
        options.name,
        asdict(options),
        data.crop_padding if options.augment else 0,
        data.normalization,
        data.class_names,
        task=options.task(),
    )


def _with_validation(options: DataOptions, clients: Sequence[ClientData]) -> Sequence[ClientData]:
    """Return clients with the validation samples that the options ask for."""
    if not options.validation:
        return clients
    part, seed = options.validation, options.seed or 0
    return [hold_out.with_validation(data, part, seed, client) for client, data in enumerate(clients)]


def _partition(
    options: DataOptions, data: Dataset, test_samples: int
) -> Iterator[tuple[partitions.Indices, partitions.Indices]]:
    """Yield the indices of every client's training and test samples."""
    (labels, test_labels), classes = data.strata()
    seed = options.seed or 0
    reuse = options.reuse and options.split == "dirichlet"
    each = partitions.samples_per_client(len(labels), options.clients, options.samples_per_client, reuse)
    if options.split in ("authors", "pathological", "quantity") and options.samples_per_client is not None:
        raise FedslrError(
            f"data.samples_per_client: split = '{options.split}' always uses all samples; leave this key out"
        )
    if options.split == "authors":
        yield from partitions.authors_partition(
            labels, test_labels, options.clients, classes, options.alpha, test_samples, seed
        )
        return
    rng, sizes = seeds.generator(seeds.SPLIT, seed), [each] * options.clients
    k = options.classes_per_client or 2
    clients = partitions.partition(labels, options.split, sizes, classes, options.alpha, k, rng, reuse)
    for train in clients:
        yield train, partitions.matching_test_set(labels[train], test_labels, test_samples, classes, rng)


def _warn_of_ignored_options(options: DataOptions, warn: Warn) -> None:
    """Warn of options without effect on this data, except defaults, because most recipes state them."""
    default, used = DataOptions(), options.uses()
    optional = (*SPLIT_OPTIONS, *POOL_OPTIONS, *TABLE_OPTIONS, "test")
    ignored = [name for name in optional if name not in used and getattr(options, name) != getattr(default, name)]
    if ignored:
        partitioned = "" if "split" in used else "is already partitioned by client and "
        warn(f"data: '{options.name}' {partitioned}ignores {', '.join(ignored)}")


def _warn_of_client_count(options: DataOptions, available: int, warn: Warn) -> None:
    default = DataOptions().clients
    if available < options.clients != default:
        warn(f"data.clients: got {options.clients}, but '{options.name}' has only {available}")
    elif available > options.clients == default:
        warn(f"data.clients: takes the first {default} of {available} clients; set clients = {available} to take all")
