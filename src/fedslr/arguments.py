"""Options that several groups of commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, dotted for tables. Repeatable."),
]
