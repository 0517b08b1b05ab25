"""`fedslr run`, `algorithms`, `recipes` and `recipe`."""

from __future__ import annotations

import io
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedslr.algorithms import ALGORITHMS
from fedslr.cli.arguments import AsJson, Changes, RecipeName, Resume, Track, default_folder
from fedslr.cli.display import Decoding, out_console
from fedslr.cli.display import warn as warn_person
from fedslr.cli.printing import print_json, print_summary
from fedslr.core import schema
from fedslr.core.errors import Interrupted
from fedslr.core.interrupts import stop_on_signal
from fedslr.data.image_decoding import decoding_progress
from fedslr.engine import distributed
from fedslr.run import api, recipe_library, recipe_text, recipes
from fedslr.run.progress import RunDisplay


def run(
    recipe: RecipeName,
    changes: Changes = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the run. Default: runs/RECIPE/METHOD.")
    ] = None,
    resume: Resume = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Record the convergence theory's quantities on evaluation rounds.")
    ] = False,
    track: Track = None,
) -> None:
    """Run a recipe: train one method.

    Results go to a folder. An interrupted run is resumed with --resume.
    """
    group = distributed.join()
    path = recipe_library.find_recipe(recipe)
    request = recipes.read(path, changes or [])
    if diagnostics:
        request = replace(request, settings=replace(request.settings, diagnostics=True))
    folder = out or default_folder(path) / request.algorithm.name
    warn = warn_person if group.first else lambda text: None
    with (
        RunDisplay(request.settings.rounds, folder, quiet=not group.first) as display,
        decoding_progress(Decoding(display.progress)),
        stop_on_signal(warn, ignore_afterwards=distributed.several()) as stopped,
    ):
        if resume and group.from_first(lambda: not folder.exists()):
            # A supervisor always starts it with --resume, also after a kill before it had a folder.
            warn(f"resume: {folder} holds no run yet; this is its beginning")
            resume = False
        try:
            result = api.run_recipe(
                request,
                folder,
                resume=resume,
                on_round=display.show,
                should_stop=stopped.__bool__,
                warn=warn,
                track=track or (),
            )
        except Interrupted as stop:
            options = [f"--set={c}" for c in changes or []] + ["--diagnostics"] * diagnostics
            options += [f"--track={name}" for name in track or []]
            again = ["fedslr", "run", recipe, *options, "--out", str(folder), "--resume"]
            raise Interrupted(f"{stop}; go on with: {shlex.join(again)}") from None
    if group.first:
        print_summary(result.summary, result.records, request.settings.torch_dtype().itemsize)
        out_console.print(f"results in {folder} (look at {folder / 'report.html'})", soft_wrap=True)


def algorithms(as_json: AsJson = False) -> None:
    """List the methods and their hyperparameters."""
    if as_json:
        print_json({name: [option._asdict() for option in schema.describe(cls)] for name, cls in ALGORITHMS.items()})
        return
    for name, cls in ALGORITHMS.items():
        out_console.print(f"{name}  {(cls.__doc__ or '').splitlines()[0]}", style="bold", soft_wrap=True)
        for option in schema.describe(cls):
            default = f"{option.default:g}" if isinstance(option.default, float) else option.default
            out_console.print(f"    {option.name} = {default}  {option.help} ({option.kind})", soft_wrap=True)


def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with fedslr."""
    rows = [(name, *recipe_library.about(path)) for name, path in recipe_library.shipped().items()]
    if as_json:
        print_json([dict(zip(("name", "command", "about"), row, strict=True)) for row in rows])
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    for name, command, about in rows:
        table.add_row(name, f"fedslr {command}", about)
    out_console.print(table)


def recipe(
    name: Annotated[
        str, typer.Argument(metavar="[METHOD]", help="A method, or a name that `fedslr recipes` lists.")
    ] = "fedslr",
) -> None:
    """Print a recipe with every key, its default and its meaning.

    The recipe is a start for one of your own: fedslr recipe ditto > mine.toml
    """
    shipped = recipe_library.shipped().get(name)
    text = shipped.read_text("utf-8") if shipped else recipe_text.template(name)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        # Recipes are read as UTF-8, whatever encoding this machine writes otherwise.
        sys.stdout.reconfigure(encoding="utf-8")
    typer.echo(text, nl=False)
