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
from fedslr.core.errors import FedslrError
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
        raise FedslrError(f"{path}: cannot be read: {error}; run again with --resume to write it anew") from None


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
        return "no such folder"
    if _run_folders(folder):
        return "no finished run in it (summary.json is missing)"
    if deeper := next(folder.glob("*/*/config.toml"), None):
        return f"no run directly in it, but there are runs in {deeper.parent.parent}; give that folder"
    return "no run in it (config.toml is missing)"


def load_run(home: Path) -> Run:
    """Return the run in a folder, finished or not."""
    path = home / "config.toml"
    try:
        recipe = path.read_text("utf-8")
        config = flatten(tomllib.loads(recipe))
        _ = config["rounds"], config["algorithm.name"]
    except (OSError, ValueError, KeyError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise FedslrError(f"{path}: cannot be read as the recipe of a run: {why}") from None
    if (home / "summary.json").exists():
        summary, records = read_run(home)
        given = {f"given.{name}": str(text) for name, text in summary.get("given", {}).items()}
        return Run(home, config | given, summary, records, recipe)
    records = read_records(home) if (home / "metrics.jsonl").exists() else []
    return Run(home, config, summary_so_far(config, records), records, recipe, finished=False)


def summary_so_far(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of an unfinished run; the model sizes are those of its last evaluation."""
    sized: Mapping[str, Any] = next((r for r in reversed(records) if r.get("parameters_personal")), {})
    personal = sized.get("parameters_personal")
    phases = {phase for r in records for phase in r["seconds_by"]}
    return {
        "algorithm": naming.short(config["algorithm.name"]),
        "dataset": config.get("data.name", "–"),
        "clients": config.get("data.clients"),
        "rounds": records[-1]["round"] if records else 0,
        "seed": config.get("seed"),
        "rerunnable": True,
        "parameters": {
            "dense": sized.get("parameters_dense"),
            "global": sized.get("parameters_global"),
            "personal": fmean(personal) if personal else None,
            "personal_std": pstdev(personal) if personal else None,
        },
        "rank": records[-1]["rank"] if records else {},
        "bytes": {way: sum(r[f"bytes_{way}"] for r in records) for way in ("down", "up")},
        "paper_gb": model_size.gigabytes(sum(r["numbers_down"] + r["numbers_up"] for r in records)),
        "seconds": {phase: sum(r["seconds_by"].get(phase, 0.0) for r in records) for phase in sorted(phases)},
    }
