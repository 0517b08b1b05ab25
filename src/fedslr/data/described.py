"""A federation as a run folder describes it: names, shapes and sizes, without the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedslr.core.errors import FedslrError
from fedslr.data.client_data import ClientData
from fedslr.data.federation import Federation
from fedslr.data.normalization import Normalization

SAMPLES_NEEDED = (
    "data: this needs the clients' samples, which a run folder does not hold; give them in Python: "
    "fedslr.open_run(folder, federation)"
)


class MissingClients(Sequence[ClientData]):
    """The clients of a federation whose samples are not here."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, client: Any) -> Any:
        raise FedslrError(SAMPLES_NEEDED)


@dataclass(frozen=True, eq=False)
class DescribedFederation(Federation):
    """A federation without its samples. Models and records need none; any use of the samples is refused."""

    shape: tuple[int, ...] = ()
    counts: Sequence[tuple[int, int]] = ()
    digest: str = ""
    """The digest of the samples, which a checkpoint has too."""

    def __post_init__(self) -> None:
        """Check nothing: the run has checked its data."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape

    @cached_property
    def sizes(self) -> Sequence[tuple[int, int]]:
        return self.counts


def describe(federation: Federation, digest: str) -> dict[str, Any]:
    """Return what a run folder keeps of a federation, as JSON."""
    return {
        "name": federation.name,
        "options": federation.options and dict(federation.options),
        "input_shape": list(federation.input_shape),
        "num_classes": federation.num_classes,
        "task": federation.task,
        "class_names": federation.class_names and list(federation.class_names),
        "client_names": federation.client_names and list(federation.client_names),
        "normalization": federation.normalization and federation.normalization._asdict(),
        "sizes": federation.sizes,
        "digest": digest,
    }


def described(facts: Mapping[str, Any]) -> DescribedFederation:
    """Return the federation that `describe` described."""
    scale = facts["normalization"]
    return DescribedFederation(
        MissingClients(len(facts["sizes"])),
        facts["num_classes"],
        facts["name"],
        facts["options"],
        normalization=scale and Normalization(*(tuple(scale[part]) for part in ("mean", "deviation"))),
        class_names=facts["class_names"],
        client_names=facts["client_names"],
        shape=tuple(facts["input_shape"]),
        counts=[(train, test) for train, test in facts["sizes"]],
        digest=facts["digest"],
        task=facts["task"],
    )
