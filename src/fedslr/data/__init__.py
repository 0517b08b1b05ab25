"""Datasets, splits and batches. `load` makes a federation from a dataset's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from fedslr import schema, seeds
from fedslr.data import splits
from fedslr.data.dataset import Dataset
from fedslr.data.digits import digits
from fedslr.data.federation import ClientData, Federation
from fedslr.data.images import cifar10, cifar100, tinyimagenet
from fedslr.errors import FedslrError, suggest
from fedslr.schema import at_least_one, countable, one_of, positive, seed_range

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tinyimagenet": tinyimagenet,
}


@dataclass(frozen=True)
class DataOptions:
    """How a dataset is shared out. A recipe's `data` table, and the keywords of `fedslr.load`."""

    name: Annotated[str, "dataset"] = "digits"
    root: Annotated[str, "folder that datasets were unpacked to; digits need none"] = "data"
    clients: Annotated[int, countable, "number of clients M"] = 100
    split: Annotated[str, one_of("iid", "dirichlet"), "how labels are spread over clients"] = "dirichlet"
    alpha: Annotated[float, positive, "concentration of the Dirichlet priors: smaller is more skewed"] = 0.1
    reuse: Annotated[bool, "dirichlet: a class that has run out starts again, as in the authors' code"] = False
    samples_per_client: Annotated[int | None, countable, "training samples of every client"] = None
    test_samples: Annotated[int | None, at_least_one, "test samples of every client"] = None
    augment: Annotated[bool, "random flips and crops of training images, for datasets that have them"] = True
    seed: Annotated[int | None, seed_range, "seed of the split; the run's seed unless given"] = None

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise FedslrError(f"data.name: got '{self.name}', no such dataset; {suggest(self.name, DATASETS)}")


def load(name: str = "digits", **options: Any) -> Federation:
    """A federation made from a dataset: `load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)`."""
    return share_out(schema.build(DataOptions, {"name": name, "seed": 0, **options}, "data"))


def share_out(options: DataOptions) -> Federation:
    """Split a dataset over clients; every client's test set follows its training labels."""
    data = DATASETS[options.name](Path(options.root))
    train_labels, test_labels = data.y.numpy(), data.y_test.numpy()
    rng = seeds.generator(seeds.SPLIT, options.seed or 0)
    reuse = options.reuse and options.split == "dirichlet"
    each = splits.samples_each(len(train_labels), options.clients, options.samples_per_client, reuse)
    if options.split == "iid":
        held = splits.iid(train_labels, options.clients, each, rng)
    else:
        priors = splits.dirichlet_priors(options.clients, data.num_classes, options.alpha, rng)
        held = splits.by_priors(train_labels, priors, each, rng, reuse)
    size = options.test_samples or data.test_samples
    clients = []
    for mine in held:
        test = splits.matching_test_set(train_labels[mine], test_labels, size, data.num_classes, rng)
        clients.append(ClientData(data.x[mine], data.y[mine], data.x_test[test], data.y_test[test]))
    if not any(len(c.y_test) for c in clients):
        raise FedslrError(
            f"data.test_samples: got {size}, too few to follow a client's labels: all test sets are empty"
        )
    padding = data.crop_padding if options.augment else 0
    return Federation(clients, data.num_classes, options.name, asdict(options), padding)


__all__ = ["DATASETS", "ClientData", "DataOptions", "Federation", "load", "share_out"]
