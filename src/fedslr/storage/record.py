"""The record of a round: one line of metrics.jsonl."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fedslr.channel.layout import Size
from fedslr.channel.model_size import Sizes
from fedslr.core.errors import FedslrError
from fedslr.storage.statistics import Evaluation, PerClient, average

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


DAMAGED = "restore the file, or run it again in another folder"


@dataclass
class Record:
    """One finished round, one line of metrics.jsonl. Fields that were not measured are left out of the line."""

    round: int
    lr: float
    clients: list[int]
    bytes_down: int = 0
    bytes_up: int = 0
    numbers_down: int = 0
    numbers_up: int = 0
    rank: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_by: dict[str, float] = field(default_factory=dict)
    accuracy_global: float | None = None
    accuracy_personal: float | None = None
    missing: list[int] | None = None
    """Sampled clients whose uploads did not count; only a deployment has such."""
    evaluated: list[int] | None = None
    """The clients of the two lists below, where they are not all."""
    accuracy_global_per_client: PerClient | None = None
    accuracy_personal_per_client: PerClient | None = None
    parameters_global: int | None = None
    """Numbers the global model needs as it is stored; below, those of each evaluated client's own model."""
    parameters_personal: list[int] | None = None
    parameters_dense: int | None = None
    """Numbers of the model as it is written down, with every matrix dense."""
    diagnostics: dict[str, float] | None = None

    def count_down(self, size: Size) -> None:
        self.bytes_down += size.bytes
        self.numbers_down += size.numbers

    def count_up(self, size: Size) -> None:
        self.bytes_up += size.bytes
        self.numbers_up += size.numbers

    def add_evaluation(self, found: Evaluation, clients: Sequence[int] | None = None) -> None:
        """Accuracies of all clients, or of the ones that are named."""
        self.evaluated = None if clients is None else list(clients)
        self.accuracy_global, self.accuracy_global_per_client = average(found.global_), found.global_
        self.accuracy_personal, self.accuracy_personal_per_client = average(found.personal), found.personal

    def add_sizes(self, found: Sizes) -> None:
        self.parameters_global, self.parameters_personal = found.global_, found.personal
        self.parameters_dense = found.dense

    def line(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None})


def read_records(path: Path, rounds: int | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: all `rounds` of a finished run; of any other, less a last one that was cut short.

    Nothing else is left out in silence: figures of the lines that are left would be those of no run.
    """
    file = path / "metrics.jsonl"
    data = file.read_bytes()
    lines = data.splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line, number))
        except ValueError as error:
            if rounds is None and number == len(lines) and not data.endswith(b"\n"):
                break
            raise FedslrError(f"{file}: line {number} {error}; {DAMAGED}") from None
    if rounds is not None and len(records) < rounds:
        raise FedslrError(f"{file}: line {len(records) + 1} is missing, the run has {rounds} rounds; {DAMAGED}")
    return records


def _record(line: bytes, number: int) -> dict[str, Any]:
    """What a line says of the round it is about; a ValueError in words for anything that no run writes."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("is damaged") from None
    wrong = [k for k, kinds in _kinds().items() if not isinstance(found, dict) or not isinstance(found.get(k), kinds)]
    if wrong:
        raise ValueError(f"is damaged: it has no '{wrong[0]}', or one of another kind")
    if found["round"] != number:
        raise ValueError(f"is of round {found['round']}, expected round {number}")
    return dict(found)


@functools.cache
def _kinds() -> dict[str, tuple[type, ...]]:
    """What a line may have for each field of a record; JSON writes a whole number for some that are none."""
    found: dict[str, tuple[type, ...]] = {}
    for name, hint in get_type_hints(Record).items():
        choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        plain = [get_origin(choice) or choice for choice in choices]
        found[name] = (*plain, int) if float in plain else tuple(plain)
    return found
