"""The run folder: config.toml, labels.json, metrics.jsonl, summary.json, report.html, checkpoint/."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import CheckpointError
from fedslr.storage.locks import lock, share
from fedslr.storage.record import Record

LEDGER = "ledger.sqlite"
"""In the run folder of a deployed federation, instead of a checkpoint."""


class RunFolder:
    """A folder that holds one run, and that one process at a time writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path)
        with disk_errors(path / "metrics.jsonl"):
            self._metrics: IO[bytes] = (path / "metrics.jsonl").open("ab")
        self._digest = hashlib.sha256()
        self._length = 0

    def close(self) -> None:
        # A failed write has already raised its error; closing would raise it again.
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._lock.close()

    def share(self) -> None:
        """Let the other processes of this run take the folder too; other runs are refused until all have ended."""
        share(self._lock)

    def write_config(self, text: str) -> None:
        write_durably(self.path / "config.toml", text.encode())

    def write_labels(self, counts: list[list[int]]) -> None:
        """Write the number of training samples by client and label, for reports."""
        write_durably(self.path / "labels.json", json.dumps({"counts": counts}).encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_durably(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

    def forget_results(self) -> None:
        """Remove the summary and the report of a run that is continued."""
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
        """Flush the metrics to the disk; return their length and SHA-256 for the checkpoint."""
        with disk_errors(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        return {"bytes": self._length, "sha256": self._digest.hexdigest()}

    def rewind(self, remembered: dict[str, Any] | None) -> None:
        """Drop the metrics that were written after a checkpoint; all metrics if there is no checkpoint."""
        self._length = 0 if remembered is None else remembered["bytes"]
        path = self.path / "metrics.jsonl"
        data = path.read_bytes()
        self._digest = hashlib.sha256(data[: self._length])
        if remembered is not None and self._digest.hexdigest() != remembered["sha256"]:
            raise CheckpointError(f"resume: {path} was changed since its checkpoint; restore it or start a new run")
        if len(data) > self._length:
            self._metrics.truncate(self._length)


class SharedFolder(RunFolder):
    """The folder of a run that another process writes to; this process only keeps other runs out."""

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
