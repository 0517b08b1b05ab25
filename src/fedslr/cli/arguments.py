"""Options that several groups of commands take, and the checks of their values."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from fedslr.core.errors import FedslrError, suggest

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, dotted for tables. Repeatable."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Also send every round to a tracker: tensorboard, mlflow, wandb. Repeatable."),
]
Pick = Annotated[
    str, typer.Option(help="Accuracy of the last, the best or the last five evaluations: last, best, late.")
]
Clients = Annotated[str, typer.Option(help="Accuracy over all clients or those sampled in that round: all, sampled.")]


def split_words(text: str) -> list[str]:
    """Return the words of a text that commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


def require_known(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise FedslrError(f"{option}: got '{value}'; {suggest(value, known)}")


def check_accuracy(pick: str, clients: str) -> None:
    """Refuse accuracies that no table has."""
    require_known("--pick", pick, ("last", "best", "late"))
    require_known("--clients", clients, ("all", "sampled"))


def run_home(out: Path | None, recipe: Path, part: str = "") -> Path:
    """Return the folder that was asked for, or one named after the recipe, with a part of it for a single run."""
    # recipes/demo/x.toml and recipes/paper/x.toml are two experiments.
    group = recipe.parent.name
    return out or Path("runs") / (f"{group}-{recipe.stem}" if group not in ("", "recipes") else recipe.stem) / part


def require_file(option: str, path: Path, example: str) -> None:
    """Refuse a path where no file can be written, before a long computation."""
    if path.is_dir() or not path.parent.is_dir():
        raise FedslrError(f"{option}: got {path}, expected a file in a folder that exists, such as {example}")
