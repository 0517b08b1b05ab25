"""Checks on run folders: refuse a folder that holds another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.group import Group
from fedslr.report.saved_runs import read_run
from fedslr.run.recipes import Recipe
from fedslr.run.resumption import difference, fixed_on_resume
from fedslr.storage.run_folder import LEDGER, RunFolder, SharedFolder


def open_together(
    group: Group, path: Path, resume: bool, config: str, algorithm: Algorithm[Any, Any, Any]
) -> RunFolder:
    """Return the run folder of all processes; the first one checks it and writes to it."""
    if not group.first:
        group.wait()
        return SharedFolder(path)
    if refusal := _refusal(path, resume) or _other_run(path, config, algorithm):
        raise FedslrError(refusal)
    folder = RunFolder(path)
    if group.size > 1:
        folder.share()
    group.wait()
    return folder


def _refusal(path: Path, resume: bool) -> str | None:
    """Return why a run may not use a folder, or None."""
    if resume and not path.exists():
        return f"resume: {path} holds no run to resume"
    if (path / LEDGER).exists():
        return f"out: {path} is the folder of a federation; go on with fedslr federation resume"
    if not resume and (has_rounds(path) or (path / "summary.json").exists()):
        return f"out: {path} already holds a run; resume it (--resume, resume=True) or choose another folder"
    if not (path / "config.toml").exists() and any(has_rounds(p.parent) for p in path.glob("*/config.toml")):
        return f"out: {path} holds the runs of a comparison or a sweep; choose another folder"
    return None


def other_run(path: Path, recipe: Recipe) -> str | None:
    """Return why a recipe may not resume the run in a folder, or None."""
    return _other_run(path, replace(recipe, settings=recipe.settings.settled()).to_toml(), recipe.algorithm)


def _other_run(path: Path, config: str, algorithm: Algorithm[Any, Any, Any]) -> str | None:
    # Nothing is kept of an attempt that finished no round, so another run may take its place.
    if not has_rounds(path):
        return None
    kept = path / "config.toml"
    try:
        changed = difference(kept.read_text("utf-8"), config, algorithm.name, fixed_on_resume(algorithm))
    except (OSError, ValueError) as error:
        return f"resume: {kept} cannot be read: {error}; restore it"
    return f"resume: {path} holds another run: {changed}; choose another folder" if changed else None


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
