"""Write and read the records of rounds, the lines of metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedslr.channel.layout import Size
from fedslr.channel.model_size import Sizes
from fedslr.core.errors import FedslrError
from fedslr.storage.statistics import Evaluation, PerClient, average

PHASES = ("train", "aggregate", "evaluate")
"""The phases of a round whose seconds a record has."""


@dataclass
class Record:
    """The record of one finished round. Its line in metrics.jsonl omits fields that were not measured."""

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
    """Sampled clients whose uploads the server did not count; only in a deployment."""
    evaluated: list[int] | None = None
    """The clients of the two lists below; None stands for all clients."""
    accuracy_global_per_client: PerClient | None = None
    accuracy_personal_per_client: PerClient | None = None
    parameters_global: int | None = None
    """The stored parameters of the global model; the next field has those of each evaluated client's personal model."""
    parameters_personal: list[int] | None = None
    parameters_dense: int | None = None
    """The parameters of the model with every matrix dense."""
    diagnostics: dict[str, float] | None = None

    def count_down(self, size: Size) -> None:
        self.bytes_down += size.bytes
        self.numbers_down += size.numbers

    def count_up(self, size: Size) -> None:
        self.bytes_up += size.bytes
        self.numbers_up += size.numbers

    def count_seconds(self, now: Mapping[str, float], before: Mapping[str, float]) -> None:
        """Add the seconds of every phase since a moment before."""
        self.seconds_by |= {phase: round(now[phase] - before[phase], 6) for phase in PHASES if phase in before}
        self.seconds = round(sum(self.seconds_by.values()), 6)

    def add_evaluation(self, found: Evaluation, clients: Sequence[int] | None = None) -> None:
        """Add the accuracies of all clients, or of the given ones."""
        self.evaluated = None if clients is None else list(clients)
        self.accuracy_global, self.accuracy_global_per_client = average(found.global_), found.global_
        self.accuracy_personal, self.accuracy_personal_per_client = average(found.personal), found.personal

    def add_sizes(self, found: Sizes) -> None:
        self.parameters_global, self.parameters_personal = found.global_, found.personal
        self.parameters_dense = found.dense

    def fields(self) -> dict[str, Any]:
        """Return the measured fields as metrics.jsonl has them."""
        return {k: v for k, v in asdict(self).items() if v is not None}

    def line(self) -> str:
        return json.dumps(self.fields())


def read_records(path: Path, rounds: int | None = None) -> list[dict[str, Any]]:
    """Return the records in a run's metrics.jsonl.

    Args:
        path: The run folder.
        rounds: The number of rounds of a finished run. Without it, a last line that a crash cut short is omitted.

    Raises:
        FedslrError: Any other line is damaged or missing. Figures without it would be wrong.
    """
    file = path / "metrics.jsonl"
    data = file.read_bytes()
    lines = data.splitlines()
    if rounds is None and lines and not data.endswith(b"\n") and _record(lines[-1], len(lines)) is None:
        lines.pop()
    lines += [b""] * ((rounds or 0) - len(lines))
    records = [_record(line, number) for number, line in enumerate(lines, start=1)]
    if None in records:
        raise FedslrError(
            f"{file}: line {records.index(None) + 1} is damaged or missing; restore the file, or repeat the run in "
            "another folder"
        )
    return [record for record in records if record is not None]


def _record(line: bytes, number: int) -> dict[str, Any] | None:
    """Return all fields of the record on a line; None if the line is not the record of this round."""
    try:
        record = Record(**json.loads(line.decode()))
        return asdict(record) if record.round == number else None
    except (ValueError, TypeError, RecursionError):
        return None
