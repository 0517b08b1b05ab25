"""Write and read the records of rounds, the lines of metrics.jsonl."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedslr.channel.layout import Size
from fedslr.channel.model_size import Sizes
from fedslr.core.errors import FedslrError
from fedslr.storage.statistics import MODELS, Evaluation, Headline, PerClient, average, find_headline

PHASES = ("train", "aggregate", "evaluate")
"""The phases of a round whose seconds a record has."""

SCORE = re.compile(r"\w+_(global|personal)(_per_client)?")
NAMED = {f"accuracy_{model}{suffix}" for model in MODELS for suffix in ("", "_per_client")}
"""The scores that are fields of a record."""


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
    metric: str | None = None
    """The headline metric of the run, unless it is accuracy."""
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
    scores: dict[str, Any] = field(default_factory=dict)
    """Losses and all metrics but accuracy, as `NAME_MODEL` and `NAME_MODEL_per_client`; they stand beside the others in
    metrics.jsonl."""

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
        """Add the scores of all clients, or of the given ones."""
        self.evaluated = None if clients is None else list(clients)
        for model, each in zip(MODELS, found, strict=True):
            scored = each or []
            for name in scored[0] if scored else ():
                values = [scores[name] for scores in scored]
                self._set(f"{name}_{model}", average(values))
                self._set(f"{name}_{model}_per_client", values)

    def _set(self, key: str, value: Any) -> None:
        if key in NAMED:
            setattr(self, key, value)
        else:
            self.scores[key] = value

    def add_sizes(self, found: Sizes) -> None:
        self.parameters_global, self.parameters_personal = found.global_, found.personal
        self.parameters_dense = found.dense

    @property
    def headline(self) -> Headline:
        """The headline metric of the run."""
        return find_headline(self.metric)

    def score(self, model: str) -> float | None:
        """Return the headline metric of the global or of the personal models; None if it was not measured."""
        key = self.headline.key(model)
        value: float | None = getattr(self, key) if key in NAMED else self.scores.get(key)
        return value

    def means(self) -> dict[str, Any]:
        """Return the round and all means over clients."""
        means = {k: v for k, v in self.flat().items() if SCORE.fullmatch(k) and isinstance(v, float)}
        return {"round": self.round, **means}

    def scores_text(self) -> str | None:
        """Return the headline metric of both models as text; None if nothing was evaluated."""
        if self.score("personal") is None:
            return None
        name = "" if self.metric is None else f"{self.headline.words} "
        shared, personal = (self.headline.text(self.score(model)) for model in MODELS)
        return f"{name}global {shared}  personal {personal}"

    def fields(self) -> dict[str, Any]:
        """Return the measured fields as metrics.jsonl has them."""
        return {k: v for k, v in self.flat().items() if v is not None}

    def flat(self) -> dict[str, Any]:
        """Return all fields; those that were not measured are None."""
        found = asdict(self)
        scores: dict[str, Any] = found.pop("scores")
        return found | scores

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Record:
        """Return the record with these fields; raise a TypeError for unknown ones."""
        own = {
            key: value for key, value in fields.items() if key in cls.__dataclass_fields__ or not SCORE.fullmatch(key)
        }
        return cls(**own, scores={key: value for key, value in fields.items() if key not in own})

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
        record = Record.read(json.loads(line.decode()))
        return record.flat() if record.round == number else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
