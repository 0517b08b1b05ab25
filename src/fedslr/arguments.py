"""Options that several groups of commands take, and what is asked of their values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedslr.errors import FedslrError

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, dotted for tables. Repeatable."),
]


def require_file(option: str, path: Path, example: str) -> None:
    """Refuse a place where no file can be, before there is work to lose."""
    if path.is_dir():
        raise FedslrError(f"{option}: {path} is a folder, expected a file such as {path / example}")
    if not path.parent.is_dir():
        raise FedslrError(f"{option}: {path.parent}: no such folder; make it, or choose another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise FedslrError(f"{option}: {path} cannot be written to; choose another place")
