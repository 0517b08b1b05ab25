"""The run folder: config.toml, labels.json, metrics.jsonl, summary.json, report.html, checkpoint/."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import CheckpointError, FedslrError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]
from fedslr.storage.locks import lock
from fedslr.storage.record import Record

LEDGER = "ledger.sqlite"
"""In the run folder of a deployed federation, instead of a checkpoint."""


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
