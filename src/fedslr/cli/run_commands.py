"""`fedslr run`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedslr.cli.arguments import Changes, Resume, Track, run_home
from fedslr.cli.display import Decoding, Display, out_console
from fedslr.cli.printing import print_summary
from fedslr.core.errors import Interrupted
from fedslr.core.interrupts import stop_on_signal
from fedslr.data.image_decoding import decoding_progress
from fedslr.engine import distributed
from fedslr.run import api, recipes


def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe, such as recipes/demo/compare.toml.")],
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run. Default: runs/RECIPE/METHOD.")] = None,
    resume: Resume = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Record the convergence theory's quantities on evaluation rounds.")
    ] = False,
    track: Track = None,
) -> None:
    """Run a recipe; results go to a folder, and an interrupted run can be resumed."""
    group = distributed.join()
    request = recipes.read(recipe, changes or [])
    if diagnostics:
        request = replace(request, settings=replace(request.settings, diagnostics=True))
    folder = run_home(out, recipe, request.algorithm.name)
    with (
        Display(request.settings.rounds, folder, quiet=not group.first) as display,
        decoding_progress(Decoding(display.progress)),
        stop_on_signal(display.warn, ignore_afterwards=distributed.several()) as stopped,
    ):
        if resume and group.from_first(lambda: not folder.exists()):
            # A supervisor always starts it with --resume, also after a kill before it had a folder.
            display.warn(f"resume: {folder} holds no run yet; this is its beginning")
            resume = False
        try:
            result = api.run_recipe(
                request,
                folder,
                resume=resume,
                on_round=display.show,
                should_stop=stopped.__bool__,
                warn=display.warn,
                track=track or (),
            )
        except Interrupted as stop:
            options = [f"--set={c}" for c in changes or []] + ["--diagnostics"] * diagnostics
            options += [f"--track={name}" for name in track or []]
            again = ["fedslr", "run", str(recipe), *options, "--out", str(folder), "--resume"]
            raise Interrupted(f"{stop}; go on with: {shlex.join(again)}") from None
    if group.first:
        print_summary(result.summary, result.records, request.settings.torch_dtype().itemsize)
        out_console.print(f"results in {folder} (look at {folder / 'report.html'})", soft_wrap=True)
