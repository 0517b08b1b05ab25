"""Write the files of a run folder: config.toml, labels.json, metrics.jsonl and summary.json."""

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

FEDERATION_DATABASE = "ledger.sqlite"
"""The database of a deployed federation, which it has in its run folder instead of a checkpoint."""


class RunFolder:
    """The folder of one run. One process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path)
        with disk_errors(path / "metrics.jsonl"):
            self._metrics: IO[bytes] = (path / "metrics.jsonl").open("ab")
        self._digest = hashlib.sha256()
        self._length = 0

    def close(self) -> None:
        # A failed write has already raised its error. Closing would raise the error again.
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._lock.close()

    def share(self) -> None:
        """Let the other processes of this run lock the folder too. Other runs are refused until all have ended."""
        share(self._lock)

    def write_config(self, text: str) -> None:
        write_durably(self.path / "config.toml", text.encode())

    def write_labels(self, counts: list[list[int]], data: dict[str, Any]) -> None:
        """Write the training samples per client and label, for reports, and what else models need of the data."""
        write_durably(self.path / "labels.json", json.dumps({"counts": counts, "data": data}).encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_durably(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

    def forget_results(self) -> None:
        """Remove the summary and the report of a run that goes on."""
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
        """Flush the metrics to disk; return their length and SHA-256 for the checkpoint."""
        with disk_errors(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        return {"bytes": self._length, "sha256": self._digest.hexdigest()}

    def rewind(self, remembered: dict[str, Any] | None) -> None:
        """Drop the metrics that were written after a checkpoint; drop all metrics if there is no checkpoint."""
        self._length = 0 if remembered is None else remembered["bytes"]
        path = self.path / "metrics.jsonl"
        data = path.read_bytes()
        self._digest = hashlib.sha256(data[: self._length])
        if remembered is not None and self._digest.hexdigest() != remembered["sha256"]:
            raise CheckpointError(f"resume: {path} was changed since its checkpoint; restore it or start a new run")
        if len(data) > self._length:
            self._metrics.truncate(self._length)


class SharedFolder(RunFolder):
    """The folder of a run that another process writes to. This process writes nothing and keeps other runs out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path, shared=True)

    def close(self) -> None:
        self._lock.close()

    def sync(self) -> dict[str, Any]:
        return {}

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Leave the file to the process that writes it."""

    write_config = write_labels = write_summary = forget_results = append = rewind = _ignore
