"""Datasets, splits and batches. `load` makes a federation from a dataset's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fedslr.core import plugins, schema, seeds
from fedslr.core.errors import FedslrError, suggest
from fedslr.core.schema import countable, one_of, positive, seed_range
from fedslr.data import own, splits
from fedslr.data.dataset import Dataset
from fedslr.data.digits import digits
from fedslr.data.federation import ClientData, Federation
from fedslr.data.images import cifar10, cifar100, tinyimagenet

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tinyimagenet": tinyimagenet,
}

FEDERATIONS: dict[str, Callable[[Path], Federation]] = {"femnist": own.femnist}
"""Datasets that come by client."""

SHARING = ("split", "alpha", "reuse", "samples_per_client", "test_samples")
"""Options that say how pooled data are shared out."""


@dataclass(frozen=True)
class DataOptions:
    """How a dataset is shared out. A recipe's `data` table, and the keywords of `fedslr.load`."""

    name: Annotated[
        str, f"{', '.join([*DATASETS, *FEDERATIONS])}, imagefolder:PATH, npz:PATH, or module:function of your own"
    ] = "digits"
    root: Annotated[str, "folder that datasets were unpacked to; digits need none"] = "data"
    clients: Annotated[int, countable, "number of clients M"] = 100
    split: Annotated[str, one_of("iid", "dirichlet", "authors"), "how labels are spread over clients"] = "dirichlet"
    alpha: Annotated[float, positive, "concentration of the Dirichlet priors: smaller is more skewed"] = 0.1
    reuse: Annotated[bool, "dirichlet: a class that has run out starts again, as in the authors' code"] = False
    samples_per_client: Annotated[int | None, countable, "training samples of every client"] = None
    test_samples: Annotated[int | None, countable, "test samples of every client"] = None
    augment: Annotated[bool, "random flips and crops of training images, for datasets that have them"] = True
    seed: Annotated[int | None, seed_range, "seed of the split; the run's seed unless given"] = None

    def __post_init__(self) -> None:
        if not (self.name in DATASETS or self.name in FEDERATIONS or plugins.is_name(self.name) or self._path()):
            names = [*DATASETS, *FEDERATIONS, "imagefolder:PATH", "npz:PATH", "module:function"]
            raise FedslrError(f"data.name: got '{self.name}', no such dataset; {suggest(self.name, names)}")

    def _path(self) -> Path | None:
        kind, colon, path = self.name.partition(":")
        return Path(path) if colon and path and kind in ("imagefolder", "npz") else None

    def pooled(self) -> Dataset | None:
        """The data before they are shared out; None where they belong to clients already."""
        path = self._path()
        if path is not None:
            return own.image_folder(path) if self.name.startswith("imagefolder:") else None
        return DATASETS[self.name](Path(self.root)) if self.name in DATASETS else None

    def natural(self) -> Federation:
        """A federation whose clients are given by the data."""
        path = self._path()
        if path is not None:
            return own.npz(path)
        if self.name in FEDERATIONS:
            return FEDERATIONS[self.name](Path(self.root))
        made = plugins.load("data.name", self.name)()
        return made if isinstance(made, Federation) else Federation.from_arrays(made, name=self.name)


def load(name: str = "digits", *, warn: Callable[[str], None] | None = None, **options: Any) -> Federation:
    """A federation made from a dataset: `load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)`."""
    asked = schema.build(DataOptions, {"name": name, "seed": 0, **options}, "data")
    return share_out(asked, warn or (lambda text: warnings.warn(text, stacklevel=5)))


def prepare(options: DataOptions) -> None:
    """Decode a dataset to its cache, for processes that are about to need it all at once."""
    if options.pooled() is None and options.name in FEDERATIONS:
        options.natural()


def share_out(options: DataOptions, tell: Callable[[str], None] = lambda text: None) -> Federation:
    """Split a dataset over clients; every client's test set follows its training labels.

    Data that come by client are taken as they are: the first `clients` of them, if there are more. Whoever asked for
    something else is told.
    """
    data = options.pooled()
    if data is None:
        found = options.natural()
        _tell_what_is_left_aside(options, len(found.clients), tell)
        names = None if found.client_names is None else found.client_names[: options.clients]
        return replace(found, clients=found.clients[: options.clients], client_names=names, options=asdict(options))
    size = options.test_samples or data.test_samples
    clients = [data.client(mine, test) for mine, test in _shares(options, data, size)]
    if not any(len(c.y_test) for c in clients):
        raise FedslrError(
            f"data.test_samples: got {size}, too few to follow a client's labels: all test sets are empty"
        )
    padding = data.crop_padding if options.augment else 0
    made = asdict(options)
    return Federation(clients, data.num_classes, options.name, made, padding, data.normalization, data.class_names)


def _shares(options: DataOptions, data: Dataset, test_size: int) -> Iterator[tuple[splits.Indices, splits.Indices]]:
    """Every client's training and test samples."""
    labels, test_labels, seed = data.y.numpy(), data.y_test.numpy(), options.seed or 0
    reuse = options.reuse and options.split == "dirichlet"
    each = splits.samples_each(len(labels), options.clients, options.samples_per_client, reuse)
    if options.split == "authors":
        if options.samples_per_client is not None:
            raise FedslrError("data.samples_per_client: the authors' split shares out all samples; leave it out")
        yield from splits.authors(
            labels, test_labels, options.clients, data.num_classes, options.alpha, test_size, seed
        )
        return
    rng = seeds.generator(seeds.SPLIT, seed)
    if options.split == "iid":
        held = splits.iid(labels, options.clients, each, rng)
    else:
        priors = splits.dirichlet_priors(options.clients, data.num_classes, options.alpha, rng)
        held = splits.by_priors(labels, priors, each, rng, reuse)
    for mine in held:
        yield mine, splits.matching_test_set(labels[mine], test_labels, test_size, data.num_classes, rng)


def _tell_what_is_left_aside(options: DataOptions, there: int, tell: Callable[[str], None]) -> None:
    """Say which options do nothing to data that come by client. Defaults stand in every written recipe: not those."""
    plain = DataOptions()
    asked = [name for name in SHARING if getattr(options, name) != getattr(plain, name)]
    if asked:
        tell(f"data: '{options.name}' comes by client and is taken as it is; {', '.join(asked)} left aside")
    if there < options.clients != plain.clients:
        tell(f"data.clients: got {options.clients}, but '{options.name}' has only {there}")


__all__ = ["DATASETS", "ClientData", "DataOptions", "Federation", "load", "prepare", "share_out"]
