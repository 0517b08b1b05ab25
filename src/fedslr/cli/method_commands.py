"""`fedslr algorithms` and `fedslr recipe`."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from fedslr.algorithms import ALGORITHMS
from fedslr.cli.display import out_console
from fedslr.core import schema
from fedslr.run import recipe_text


def algorithms() -> None:
    """List the methods and their hyperparameters."""
    for name, cls in ALGORITHMS.items():
        out_console.print(f"{name}  {(cls.__doc__ or '').splitlines()[0]}", style="bold", soft_wrap=True)
        for option in schema.describe(cls):
            default = f"{option.default:g}" if isinstance(option.default, float) else option.default
            out_console.print(f"    {option.name} = {default}  {option.help} ({option.kind})", soft_wrap=True)


def recipe(
    method: Annotated[str, typer.Argument(help="The method it is for.", metavar="[METHOD]")] = "fedslr",
) -> None:
    """Print a recipe with every key, its default and its meaning: a start for one of your own."""
    made = recipe_text.template(method)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        # Recipes are read as UTF-8, whatever encoding this machine writes otherwise.
        sys.stdout.reconfigure(encoding="utf-8")
    typer.echo(made, nl=False)
