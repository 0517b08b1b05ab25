"""Options that several groups of commands take, and what is asked of their values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedslr.core.errors import FedslrError

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, dotted for tables. Repeatable."),
]
Pick = Annotated[
    str, typer.Option(help="Accuracy of the last, the best or the last five evaluations: last, best, late.")
]
Clients = Annotated[str, typer.Option(help="Accuracy over all clients or those sampled in that round: all, sampled.")]


def check_choices(pick: str, clients: str) -> None:
    """Refuse accuracies that no table has."""
    for name, value, known in (("pick", pick, ("last", "best", "late")), ("clients", clients, ("all", "sampled"))):
        if value not in known:
            raise FedslrError(f"--{name}: got '{value}', expected {', '.join(known[:-1])} or {known[-1]}")


def require_file(option: str, path: Path, example: str) -> None:
    """Refuse a place where no file can be, before there is work to lose."""
    if path.is_dir():
        raise FedslrError(f"{option}: {path} is a folder, expected a file such as {path / example}")
    if not path.parent.is_dir():
        raise FedslrError(f"{option}: {path.parent}: no such folder; make it, or choose another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise FedslrError(f"{option}: {path} cannot be written to; choose another place")
