"""The run folder: config.toml, labels.json, metrics.jsonl (a line per round), summary.json, report.html, checkpoint."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import IO, Any, get_args, get_origin, get_type_hints

from fedslr.errors import CheckpointError, FedslrError, TakenError
from fedslr.metrics import Evaluation, PerClient, Sizes, average
from fedslr.store import disk_errors, write_durably
from fedslr.wire import Size

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


LEDGER = "ledger.sqlite"
"""In the run folder of a deployed federation, instead of a checkpoint."""


def lock(folder: Path, shared: bool = False, wait: bool = False, mode: int = 0o777, called: str = "out") -> IO[str]:
    """Take a folder for this process, or for several; the lock goes with the file that is returned.

    `called` is what the folder is to whoever named it.
    """
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a", encoding="utf-8")
    except OSError as error:
        raise FedslrError(f"{called}: cannot write to {folder}: {error.strerror}; choose another folder") from error
    if fcntl is not None:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise TakenError(f"out: another process is running in {folder}; wait for it or choose another") from None
    return handle


def is_taken(folder: Path) -> bool:
    """Whether a process works in a folder, as far as it can be looked into: nothing is written there."""
    for mode in ("r+b", "rb"):  # a network's disk may lock only what can be written
        try:
            with (folder / ".lock").open(mode) as handle:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            continue
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    with lock(folder):
        yield


class RunFolder:
    """A folder that holds one run, and that one process at a time writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path)
        try:
            self._metrics: IO[bytes] = (path / "metrics.jsonl").open("ab")
        except OSError as error:
            self._lock.close()
            raise FedslrError(f"out: cannot write to {path}: {error.strerror}; choose another folder") from error
        self._digest = hashlib.sha256()
        self._length = 0

    def close(self) -> None:
        # What could not be written was already told; closing must not tell it again.
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._lock.close()

    def share(self) -> None:
        """Let the other processes of this run take the folder too; until all of them are gone, no other run can."""
        if fcntl is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def write_config(self, text: str) -> None:
        write_durably(self.path / "config.toml", text.encode())

    def write_labels(self, counts: list[list[int]]) -> None:
        """Training samples by client and label, for whoever looks at the run."""
        write_durably(self.path / "labels.json", json.dumps({"counts": counts}).encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_durably(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

    def forget_results(self) -> None:
        """A run that goes on has no results yet."""
        for name in ("summary.json", "report.html"):
            (self.path / name).unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        line = record.line().encode() + b"\n"
        with disk_errors(self.path / "metrics.jsonl"):
            self._metrics.write(line)
            self._metrics.flush()
        self._digest.update(line)
        self._length += len(line)

    def has_lines(self) -> bool:
        return (self.path / "metrics.jsonl").stat().st_size > 0

    def sync(self) -> dict[str, Any]:
        """Flush the metrics to the disk; how long they are and their SHA-256, for a checkpoint to remember."""
        with disk_errors(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        return {"bytes": self._length, "sha256": self._digest.hexdigest()}

    def rewind(self, remembered: dict[str, Any] | None) -> None:
        """Drop the lines of rounds that a checkpoint does not know; all of them where there is no checkpoint."""
        self._length = 0 if remembered is None else remembered["bytes"]
        path = self.path / "metrics.jsonl"
        data = path.read_bytes()
        self._digest = hashlib.sha256(data[: self._length])
        if remembered is not None and self._digest.hexdigest() != remembered["sha256"]:
            raise CheckpointError(f"resume: {path} was changed since its checkpoint; restore it or start a new run")
        if len(data) > self._length:
            self._metrics.truncate(self._length)


class SharedFolder(RunFolder):
    """The folder of a run that another process writes to; this one only keeps it from being taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path, shared=True)

    def close(self) -> None:
        self._lock.close()

    def write_config(self, text: str) -> None:
        pass

    def write_labels(self, counts: list[list[int]]) -> None:
        pass

    def write_summary(self, summary: dict[str, Any]) -> None:
        pass

    def forget_results(self) -> None:
        pass

    def append(self, record: Record) -> None:
        pass

    def sync(self) -> dict[str, Any]:
        return {}

    def rewind(self, remembered: dict[str, Any] | None) -> None:
        pass


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
