"""The data options of a recipe, and the federation that they describe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fedslr.core import plugins, schema, seeds
from fedslr.core.errors import FedslrError, suggest
from fedslr.core.schema import countable, one_of, positive, seed_range
from fedslr.data import partitions
from fedslr.data.cifar import cifar10, cifar100
from fedslr.data.dataset import Dataset
from fedslr.data.digits import digits
from fedslr.data.federation import Federation
from fedslr.data.femnist import femnist
from fedslr.data.image_folder import image_folder
from fedslr.data.npz_files import npz_federation
from fedslr.data.tinyimagenet import tinyimagenet

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tinyimagenet": tinyimagenet,
}
"""Pooled datasets by name, which fedslr partitions over clients."""

PARTITIONED_DATASETS: dict[str, Callable[[Path], Federation]] = {"femnist": femnist}
"""Datasets by name that are already partitioned by client."""

DATASET_TASKS: dict[str, str] = {}
"""The tasks of datasets by name, where they are not classifications."""

PARTITION_OPTIONS = ("split", "alpha", "reuse", "samples_per_client", "test_samples")
"""The options that only the partition of a pooled dataset uses."""


@dataclass(frozen=True)
class DataOptions:
    """The dataset and its partition: a recipe's `data` table, and the keywords of `fedslr.load`."""

    name: Annotated[
        str,
        f"{', '.join([*DATASETS, *PARTITIONED_DATASETS])}, imagefolder:PATH, npz:PATH, or module:function of your own",
    ] = "digits"
    root: Annotated[str, "folder that datasets were unpacked to; digits needs none"] = "data"
    clients: Annotated[int, countable, "number of clients M"] = 100
    split: Annotated[str, one_of("iid", "dirichlet", "authors"), "label distribution over clients"] = "dirichlet"
    alpha: Annotated[float, positive, "concentration of the Dirichlet priors: smaller is more skewed"] = 0.1
    reuse: Annotated[bool, "reuse the samples of a class that has run out, as in the authors' code"] = False
    samples_per_client: Annotated[int | None, countable, "training samples of every client"] = None
    test_samples: Annotated[int | None, countable, "test samples of every client"] = None
    augment: Annotated[bool, "random flips and crops of training images, for datasets that define them"] = True
    seed: Annotated[int | None, seed_range, "seed of the split; the run's seed unless given"] = None

    def __post_init__(self) -> None:
        kind, path = self._kind_and_path()
        named = self.name in DATASETS or self.name in PARTITIONED_DATASETS or plugins.is_name(self.name)
        if not (named or (kind in ("imagefolder", "npz") and path)):
            names = [*DATASETS, *PARTITIONED_DATASETS, "imagefolder:PATH", "npz:PATH", "module:function"]
            raise FedslrError(f"data.name: got '{self.name}', no such dataset; {suggest(self.name, names)}")

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

    def partitioned(self, task: str) -> Federation:
        """Return the federation of data that is already partitioned by client."""
        kind, path = self._kind_and_path()
        if kind == "npz":
            return npz_federation(Path(path), task)
        if self.name in PARTITIONED_DATASETS:
            return PARTITIONED_DATASETS[self.name](Path(self.root))
        made = plugins.function("data.name", self.name)()
        return (
            made.for_task(task)
            if isinstance(made, Federation)
            else Federation.from_arrays(made, name=self.name, task=task)
        )


def load(
    name: str = "digits", *, task: str | None = None, warn: Callable[[str], None] | None = None, **options: Any
) -> Federation:
    """Return a federation made from a dataset.

    A pooled dataset is partitioned over clients. Every client's test set has the label ratio of its training set. Data
    that is already partitioned by client keeps its partition.

    Args:
        name: `digits`, `cifar10`, `cifar100`, `tinyimagenet`, `femnist`, `imagefolder:PATH`, `npz:PATH`, or
            `module:function` of your own, which returns a `Federation` or what `Federation.from_arrays` takes.
        task: The task that the labels are for, see `Federation.from_arrays`; by default the dataset's own.
        warn: A function that is called with the text of every warning; by default `warnings.warn`.
        **options: The keys of a recipe's `data` table:

            - `root`: The folder that datasets were unpacked to (default `"data"`). `digits` needs none.
            - `clients`: The number of clients (default 100). Of data that is already partitioned, the first `clients`
              clients are taken.
            - `split`: The label distribution over clients: `"dirichlet"` (default), `"iid"`, or `"authors"`, the
              partition of the FedSLR authors' code.
            - `alpha`: The concentration of the Dirichlet distribution (default 0.1): smaller is more skewed.
            - `reuse`: Whether a class that has run out starts again, as in the authors' code (default `False`).
            - `samples_per_client`: Training samples of every client; by default all samples are used.
            - `test_samples`: Test samples of every client; the default depends on the dataset.
            - `augment`: Whether training images are flipped and cropped at random, for datasets that define it
              (default `True`).
            - `seed`: The seed of the partition (default 0).

    Returns:
        The federation. Its data lies in memory or is mapped from the disk.

    Raises:
        FedslrError: The name or an option is unknown, a value is out of range, the dataset is missing or damaged, or it
            has too few samples for this many clients.

    Example:
        federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)
        result = fedslr.run(fedslr.FedSLR(), federation, model="cnn", rounds=30)
    """
    checked = schema.build(DataOptions, {"name": name, "seed": 0, **options}, "data")
    return build_federation(checked, warn or (lambda text: warnings.warn(text, stacklevel=5)), task)


def decode_to_cache(options: DataOptions) -> None:
    """Decode a dataset to its cache, before several processes need it at once."""
    if options.pooled() is None and options.name in PARTITIONED_DATASETS:
        options.partitioned(options.task())


def build_federation(
    options: DataOptions, warn: Callable[[str], None] = lambda text: None, task: str | None = None
) -> Federation:
    """Return the federation that data options describe, for a task: by default that of the dataset.

    Of data that is already partitioned, the first `options.clients` clients are taken.
    """
    data, task = options.pooled(), task or options.task()
    if data is None:
        found = options.partitioned(task)
        _warn_of_ignored_options(options, len(found.clients), warn)
        names = None if found.client_names is None else found.client_names[: options.clients]
        return replace(found, clients=found.clients[: options.clients], client_names=names, options=asdict(options))
    test_samples = options.test_samples or data.test_samples
    clients = [data.client(train, test) for train, test in _partition(options, data, test_samples)]
    if not any(len(c.y_test) for c in clients):
        raise FedslrError(
            f"data.test_samples: got {test_samples}, too few for test sets with the clients' label ratios: all test "
            "sets are empty; choose more"
        )
    made = Federation(
        clients,
        data.num_classes,
        options.name,
        asdict(options),
        data.crop_padding if options.augment else 0,
        data.normalization,
        data.class_names,
        task=options.task(),
    )
    return made.for_task(task)


def _partition(
    options: DataOptions, data: Dataset, test_samples: int
) -> Iterator[tuple[partitions.Indices, partitions.Indices]]:
    """Yield the indices of every client's training and test samples."""
    labels, test_labels, seed = data.y.numpy(), data.y_test.numpy(), options.seed or 0
    reuse = options.reuse and options.split == "dirichlet"
    each = partitions.samples_per_client(len(labels), options.clients, options.samples_per_client, reuse)
    if options.split == "authors":
        if options.samples_per_client is not None:
            raise FedslrError("data.samples_per_client: split = 'authors' always uses all samples; leave this key out")
        yield from partitions.authors_partition(
            labels, test_labels, options.clients, data.num_classes, options.alpha, test_samples, seed
        )
        return
    rng = seeds.generator(seeds.SPLIT, seed)
    if options.split == "iid":
        clients = partitions.iid_partition(labels, options.clients, each, rng)
    else:
        priors = partitions.dirichlet_priors(options.clients, data.num_classes, options.alpha, rng)
        clients = partitions.partition_by_priors(labels, priors, each, rng, reuse)
    for train in clients:
        yield train, partitions.matching_test_set(labels[train], test_labels, test_samples, data.num_classes, rng)


def _warn_of_ignored_options(options: DataOptions, available: int, warn: Callable[[str], None]) -> None:
    """Warn of options without effect on partitioned data, except defaults, because most recipes state them."""
    default = DataOptions()
    ignored = [name for name in PARTITION_OPTIONS if getattr(options, name) != getattr(default, name)]
    if ignored:
        warn(f"data: '{options.name}' is already partitioned by client and ignores {', '.join(ignored)}")
    if available < options.clients != default.clients:
        warn(f"data.clients: got {options.clients}, but '{options.name}' has only {available}")
