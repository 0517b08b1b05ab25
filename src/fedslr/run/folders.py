"""Checks on run folders: refuse a folder that holds another run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedslr.core.errors import FedslrError
from fedslr.core.group import Group
from fedslr.report import read_run
from fedslr.run.recipes import Recipe
from fedslr.run.resumption import difference, fixed_on_resume
from fedslr.storage.run_folder import LEDGER, RunFolder, SharedFolder


def open_together(
    group: Group, path: Path, resume: bool, config: str, called: str, fixed: Collection[str]
) -> RunFolder:
    """The run folder of all processes, which the first one checks and writes to."""
    if not group.first:
        group.wait()
        return SharedFolder(path)
    folder = open_folder(path, resume, config, called, fixed)
    if group.size > 1:
        folder.share()
    group.wait()
    return folder


def open_folder(path: Path, resume: bool, config: str, called: str, fixed: Collection[str] = ()) -> RunFolder:
    """The run folder, refused where it holds another run, or this one without having been asked to go on."""
    try:
        if resume and not path.exists():
            raise FedslrError(f"resume: {path} holds no run to resume")
        if path.exists() and not path.is_dir():
            raise FedslrError(f"out: {path} is a file; choose a folder")
    except OSError as error:
        raise FedslrError(f"out: {path} cannot be used: {error.strerror}") from error
    folder = RunFolder(path)
    try:
        _check_folder(path, resume, config, called, fixed)
    except FedslrError:
        folder.close()
        raise
    return folder


def _check_folder(path: Path, resume: bool, config: str, called: str, fixed: Collection[str]) -> None:
    kept, begun = path / "config.toml", has_rounds(path)
    if not resume and (begun or (path / "summary.json").exists()):
        raise FedslrError(
            f"out: {path} already holds a run; resume it (--resume, resume=True) or choose another folder"
        )
    if (path / LEDGER).exists():
        raise FedslrError(f"out: {path} is the folder of a federation; go on with fedslr federation resume")
    if not kept.exists() and any(has_rounds(p.parent) for p in path.glob("*/config.toml")):
        raise FedslrError(f"out: {path} holds runs in folders of their own, a comparison's say; choose another folder")
    if resume and not kept.exists() and begun:
        raise FedslrError(f"resume: {kept} is missing, so nobody can tell which run this is; restore it")
    # Of an attempt that never finished a round nothing is kept, so that another may take its place.
    if resume and kept.exists() and begun:
        try:
            changed = difference(kept.read_text("utf-8"), config, called, fixed)
        except (OSError, ValueError) as error:
            raise FedslrError(f"resume: {kept} is damaged: {error}") from error
        if changed:
            raise FedslrError(f"resume: this is not the run in {path}: {changed}")


def changed(path: Path, recipe: Recipe) -> str | None:
    """What forbids going on with the rounds in a folder by a recipe; None if nothing does, or none can tell."""
    if not has_rounds(path):
        return None
    now = replace(recipe, settings=recipe.settings.settled()).to_toml()
    try:
        kept = (path / "config.toml").read_text("utf-8")
        return difference(kept, now, recipe.algorithm.name, fixed_on_resume(recipe.algorithm))
    except (OSError, ValueError):
        return None


def has_results(path: Path) -> bool:
    """Whether what a finished run leaves is all there, and can be read."""
    try:
        read_run(path)
    except FedslrError:
        return False
    return (path / "labels.json").exists()


def has_rounds(path: Path) -> bool:
    """Whether a folder holds rounds of some run; an attempt killed before its first round leaves none."""
    metrics_file = path / "metrics.jsonl"
    manifests = path / "checkpoint"
    return (metrics_file.exists() and metrics_file.stat().st_size > 0) or any(manifests.glob("manifest-*.json"))
