"""Runs read from their folders, finished or not."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from fedslr.algorithms import naming
from fedslr.channel import model_size
from fedslr.core.errors import FedslrError, reason
from fedslr.core.schema import flatten
from fedslr.storage import statistics
from fedslr.storage.record import read_records
from fedslr.storage.statistics import Headline


class Run(NamedTuple):
    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    """The content of summary.json; for an unfinished run, the same figures up to its last round."""
    records: list[dict[str, Any]]
    recipe: str = ""
    """The text of config.toml."""
    finished: bool = True

    @property
    def metric(self) -> Headline:
        """The headline metric."""
        if "metric" in self.summary:
            return statistics.headline_of(self.summary)
        return statistics.find_headline(next((r["metric"] for r in self.records if r.get("metric")), None))


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the summary and the records of a finished run."""
    path = folder / "summary.json"
    try:
        summary = dict(json.loads(path.read_text("utf-8")))
        return summary, read_records(folder, summary["rounds"])
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        path = Path(getattr(error, "filename", None) or path)
        why = _why_unreadable(error)
        raise FedslrError(f"{path}: cannot be read: {why}; run again with --resume to write it anew") from None


def _why_unreadable(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else reason(error)


def find_runs(folders: Sequence[Path], unfinished: bool = False) -> list[Run]:
    """Return the finished runs in the given folders or right below them; with `unfinished`, all runs."""
    runs: dict[Path, Run] = {}
    for folder in folders:
        found = [home for home in _run_folders(folder) if unfinished or (home / "summary.json").exists()]
        if not found:
            raise FedslrError(f"{folder}: {_why_no_runs(folder)}")
        for home in found:
            # The same folder by another path is the same run.
            runs.setdefault(home.resolve(), load_run(home))
    return list(runs.values())


def unfinished_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the readable runs in the given folders, or right below them, that have not finished."""
    found: dict[Path, Run] = {}
    for home in (home for folder in folders for home in _run_folders(folder)):
        if not (home / "summary.json").exists():
            with contextlib.suppress(FedslrError):
                found.setdefault(home.resolve(), load_run(home))
    return list(found.values())


def _run_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it holds a run, else the run folders right below it."""
    return [folder] if (folder / "config.toml").exists() else sorted(p.parent for p in folder.glob("*/config.toml"))


def _why_no_runs(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder; correct the path"
    if _run_folders(folder):
        return "no finished run in it (summary.json is missing); finish its run with --resume"
    if deeper := next(folder.glob("*/*/config.toml"), None):
        return f"no run directly in it, but there are runs in {deeper.parent.parent}; give that folder"
    return "no run in it (config.toml is missing); name the folder of a run, or one that holds such folders"


def load_run(home: Path) -> Run:
    """Return the run in a folder, finished or not."""
    path = home / "config.toml"
    try:
        recipe = path.read_text("utf-8")
        config = flatten(tomllib.loads(recipe))
        _ = config["rounds"], config["algorithm.name"]
    except (OSError, ValueError, KeyError) as error:
        raise FedslrError(
            f"{path}: cannot be read as the recipe of a run: {_why_unreadable(error)}; restore it"
        ) from None
    if (home / "summary.json").exists():
        return finished_run(home, recipe, *read_run(home))
    records = read_records(home) if (home / "metrics.jsonl").exists() else []
    return Run(home, config, summary_so_far(config, records), records, recipe, finished=False)


def finished_run(home: Path, recipe: str, summary: dict[str, Any], records: list[dict[str, Any]]) -> Run:
    """Return a finished run, given the text of its config.toml, its summary and its records."""
    given = {f"given.{name}": str(text) for name, text in summary.get("given", {}).items()}
    return Run(home, flatten(tomllib.loads(recipe)) | given, summary, records, recipe)


def summary_so_far(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of an unfinished run; the model sizes are those of its last evaluation."""
    sized: Mapping[str, Any] = next((r for r in reversed(records) if r.get("parameters_personal")), {})
    personal, dense = sized.get("parameters_personal"), sized.get("parameters_dense")
    phases = {phase for r in records for phase in r["seconds_by"]}
    return {
        "algorithm": naming.short(config["algorithm.name"]),
        "dataset": config.get("data.name", "–"),
        "clients": config.get("data.clients"),
        "rounds": records[-1]["round"] if records else 0,
        "seed": config.get("seed"),
        "rerunnable": True,
        "parameters": {
            "dense": dense,
            "global": sized.get("parameters_global"),
            "personal": fmean(personal) if personal else None,
            "personal_std": pstdev(personal) if personal else None,
            "shipped": model_size.shipped(personal, dense) if personal and dense else None,
        },
        "rank": records[-1]["rank"] if records else {},
        "bytes": {way: sum(r[f"bytes_{way}"] for r in records) for way in ("down", "up")},
        "paper_gb": model_size.gigabytes(sum(r["numbers_down"] + r["numbers_up"] for r in records)),
        "seconds": {phase: sum(r["seconds_by"].get(phase, 0.0) for r in records) for phase in sorted(phases)},
    }
