"""Checks on run folders: refuse a folder that holds another run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, reason
from fedslr.core.group import Group
from fedslr.core.schema import flatten
from fedslr.engine.settings import Settings
from fedslr.report.saved_runs import read_run
from fedslr.run.recipe_text import dotted, setting_tables
from fedslr.storage.run_folder import FEDERATION_DATABASE, RunFolder, SharedFolder

RESUMABLE = {"rounds", "device", "store", "memory_budget", "evaluate_every", "checkpoint_every", "checkpoint_minutes"}
"""The settings that may change when a run is resumed: they change no round that was already made."""


def open_together(group: Group, path: Path, resume: bool, config: str, planner: str | None) -> RunFolder:
    """Return the run folder of all processes; the first one checks it and writes to it."""
    if not group.first:
        group.wait()
        return SharedFolder(path)
    _require_free(path, resume)
    require_same_run(path, config, planner)
    folder = RunFolder(path)
    if group.size > 1:
        folder.share()
    group.wait()
    return folder


def _require_free(path: Path, resume: bool) -> None:
    """Refuse a folder that this run may not use."""
    if resume and not path.exists():
        raise FedslrError(f"resume: {path} holds no run to resume; leave resume out to start one")
    if (path / FEDERATION_DATABASE).exists():
        raise FedslrError(f"out: {path} is the folder of a federation; go on with fedslr federation resume {path}")
    if not resume and (has_rounds(path) or (path / "summary.json").exists()):
        raise FedslrError(f"out: {path} already holds a run; resume it (--resume, resume=True) or choose another")
    if not (path / "config.toml").exists() and any(has_rounds(p.parent) for p in path.glob("*/config.toml")):
        raise FedslrError(f"out: {path} holds the runs of a comparison or a sweep; choose another folder")


def require_same_run(path: Path, config: str, planner: str | None) -> None:
    """Refuse a recipe that differs from that of the run in a folder; `planner` is the result of `planner_of`."""
    # Nothing is kept of an attempt that finished no round, so another run may take its place.
    if not has_rounds(path):
        return
    kept = path / "config.toml"
    try:
        changed = difference(kept.read_text("utf-8"), config, planner)
    except FileNotFoundError:
        raise FedslrError(f"resume: {kept} is missing; restore it, or choose another folder") from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else f"it is not valid TOML: {error}"
        raise FedslrError(f"resume: {kept} cannot be read: {why}; restore it") from None
    if changed:
        raise FedslrError(f"resume: {path} holds another run: {changed}; choose another folder")


def has_results(path: Path) -> bool:
    """Return whether all files of a finished run are there and can be read."""
    try:
        read_run(path)
    except FedslrError:
        return False
    return (path / "labels.json").exists()


def has_rounds(path: Path) -> bool:
    """Return whether a folder holds rounds of a run; an attempt killed before its first round leaves none."""
    metrics_file = path / "metrics.jsonl"
    manifests = path / "checkpoint"
    return (metrics_file.exists() and metrics_file.stat().st_size > 0) or any(manifests.glob("manifest-*.json"))


def planner_of(algorithm: Algorithm[Any, Any, Any], settings: Settings) -> str | None:
    """Return the method or the schedule whose rounds depend on their total number, which then may not change."""
    if algorithm.planned:
        return algorithm.name
    return f"schedule '{settings.schedule.name}'" if settings.schedule.planned else None


def difference(old: str, new: str, planner: str | None = None) -> str | None:
    """Return the first key in which two recipes may not differ if one resumes the other, with both values, or None."""
    # A recipe of an earlier version lacks later settings; its run had what are their defaults now.
    plain, grouped = setting_tables(Settings())
    before, after = (flatten(grouped) | flatten(plain | tomllib.loads(text)) for text in (old, new))
    allowed = {dotted(k) for k in RESUMABLE} - ({"rounds"} if planner else set())
    names_first = lambda key: (key != "algorithm.name", not key.endswith(".name"), key)  # noqa: E731
    for key in sorted(before.keys() | after.keys(), key=names_first):
        if key not in allowed and before.get(key) != after.get(key):
            why = f"; rounds of {planner} depend on it from the first on" if planner and key == "rounds" else ""
            return f"{key} was {schema.show(before.get(key))}, now {schema.show(after.get(key))}{why}"
    return None
