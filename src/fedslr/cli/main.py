"""The command line. Exit codes: 0 done, 2 the request was wrong (one plain line), 1 a defect, 130 interrupted."""

from __future__ import annotations

import io
import os
import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fedslr.algorithms import ALGORITHMS
from fedslr.cli import data_commands as data
from fedslr.cli import export_commands as shipping
from fedslr.cli import federation_commands as deploy
from fedslr.cli import report_commands
from fedslr.cli.arguments import Changes, Clients, Pick, check_choices
from fedslr.cli.display import (
    Decoding,
    Display,
    ManyDisplay,
    err_console,
    out_console,
    print_summary,
    print_table,
    warn,
)
from fedslr.core import plugins, schema
from fedslr.core.durable import write_durably
from fedslr.core.errors import INTERRUPTED, FedslrError, FedslrWarning, Interrupted, show_traceback
from fedslr.core.failures import failure
from fedslr.core.interrupts import stop_on_signal
from fedslr.core.version import __version__
from fedslr.data.images import reporting
from fedslr.engine import distributed
from fedslr.report import figures, tables
from fedslr.report.page import write_report
from fedslr.run import api, experiments, recipe_text, recipes
from fedslr.run import trackers as tracking
from fedslr.storage import statistics
from fedslr.storage.locks import locked

SEVERAL = 5
"""Failed runs whose reasons are told."""

# Help is plain text; before 0.21 typer escapes brackets for rich in it wherever rich is installed.
typer.core.HAS_RICH = False

app = typer.Typer(
    help="Personalized federated learning: a low-rank global model plus a sparse personal part per client.",
    invoke_without_command=True,
    context_settings={"max_content_width": 110},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Also tell a tracker every round: tensorboard, mlflow, wandb. Repeatable."),
]
Jobs = Annotated[int | None, typer.Option(help="Runs at once. Default: one per core, one on a GPU.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedslr {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Personalized federated learning."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
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
    folder = _home(out, recipe, request.algorithm.name)
    with (
        Display(request.settings.rounds, folder, quiet=not group.first) as display,
        reporting(Decoding(display.progress)),
        stop_on_signal(display.warn, ignore_afterwards=distributed.several()) as stopped,
    ):
        if resume and group.from_first(lambda: not folder.exists()):
            # It may have been killed before it had a folder, and whoever starts it again always says --resume.
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
            sets = [f"--set={c}" for c in changes or []] + ["--diagnostics"] * diagnostics
            sets += [f"--track={name}" for name in track or []]
            again = ["fedslr", "run", str(recipe), *sets, "--out", str(folder), "--resume"]
            raise Interrupted(f"{stop}; go on with: {shlex.join(again)}") from None
    if not group.first:
        return
    print_summary(result.summary, result.records, request.settings.torch_dtype().itemsize)
    out_console.print(f"results in {folder} (look at {folder / 'report.html'})", soft_wrap=True)


@app.command()
def compare(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe; its `compare` table may name methods and seeds.")],
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas, or `all`.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs. Default: runs/RECIPE.")] = None,
    resume: Resume = False,
    jobs: Jobs = None,
    pick: Pick = "last",
    clients: Clients = "all",
    track: Track = None,
) -> None:
    """Run several methods on identical splits, starts and cohorts, and put them in one table."""
    request = recipes.read(recipe, changes or [])
    names = _words(methods) if methods is not None else list(request.compare.methods)
    names = list(ALGORITHMS) if names == ["all"] else names
    home = _home(out, recipe)
    made = experiments.comparison(request, names, _seeds(seeds, request), home)
    asked = next((c for c in changes or [] if c.startswith("algorithm.")), None)
    if asked is not None and not any(type(job.recipe.algorithm) is type(request.algorithm) for job in made):
        warn(
            f"--set {asked}: {request.algorithm.name} is none of the methods; what a method is set to is "
            "--set methods.NAME.KEY=VALUE"
        )
    _experiment(made, home, resume, jobs, pick, clients, track or [])


@app.command()
def sweep(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe; its `sweep` table may name keys and values.")],
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,…", help="Values of a key of the recipe or of its method. Repeatable."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.")] = None,
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs. Default: runs/RECIPE.")] = None,
    resume: Resume = False,
    jobs: Jobs = None,
    pick: Pick = "last",
    clients: Clients = "all",
    track: Track = None,
) -> None:
    """Run a recipe with every combination of some values, and put the runs in one table."""
    request = recipes.read(recipe, changes or [])
    axes = [_axis(text) for text in over or []]
    values = dict(axes) if axes else dict(request.sweep)
    if len(values) < len(axes):
        raise FedslrError(f"--over: got '{' '.join(key for key, _ in axes)}', expected each key once")
    home = _home(out, recipe)
    made = experiments.sweep(request, values, _seeds(seeds, request), home)
    _experiment(made, home, resume, jobs, pick, clients, track or [])


@app.command()
def show(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or folders that hold such.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw accuracy over rounds to this PNG, PDF or SVG.")] = None,
    pick: Pick = "last",
    clients: Clients = "all",
    format: Annotated[str, typer.Option(help="text, markdown, csv or latex.")] = "text",
) -> None:
    """Put finished runs side by side: mean ± deviation over seeds."""
    check_choices(pick, clients)
    if plot is not None:
        report_commands.kind_of(plot, "--plot")
    runs, beside = tables.find_runs(folders), tables.unfinished(folders)
    made, written = _tables(runs, pick, clients, beside)
    if format in written:
        typer.echo(written[format], nl=False)
    elif format == "text":
        print_table(made)
    else:
        raise FedslrError(f"--format: got '{format}', expected text, {', '.join(written)}")
    if plot is not None:
        _draw(runs, plot)
    if beside:
        warn(f"not in the table, since they are not finished: {', '.join(str(run.folder) for run in beside)}")


def _home(out: Path | None, recipe: Path, part: str = "") -> Path:
    """The folder that was asked for, or one named after the recipe; a part of it for a single run."""
    if out is not None and not out.name:
        raise FedslrError(f"--out: got '{out}', expected a folder of its own")
    # recipes/demo/x.toml and recipes/paper/x.toml are two experiments.
    group = recipe.parent.name
    return out or Path("runs") / (f"{group}-{recipe.stem}" if group not in ("", "recipes") else recipe.stem) / part


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _seeds(text: str | None, request: recipes.Recipe) -> list[int]:
    if text is None:
        return list(request.compare.seeds) or [request.settings.seed]
    if not all(word.isdecimal() for word in _words(text)):
        raise FedslrError(f"seeds: got '{text}', expected whole numbers such as 0,1,2")
    return [int(word) for word in _words(text)]


def _axis(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not equals or not _words(values):
        raise FedslrError(f"--over: got '{text}', expected key=value,value such as rank_penalty=1e-5,1e-4")
    listed = recipes.value_of(f"[{values}]")
    return key.strip(), listed if isinstance(listed, list) else [recipes.value_of(word) for word in _words(values)]


def _experiment(
    made: list[experiments.Job], home: Path, resume: bool, jobs: int | None, pick: str, clients: str, told: list[str]
) -> None:
    """Run the jobs, then print and write their table."""
    if distributed.several():
        raise FedslrError("torchrun: several processes work on one run (fedslr run); several runs are --jobs' work")
    check_choices(pick, clients)
    if jobs is not None and jobs < 1:
        raise FedslrError(f"jobs: got {jobs}, expected a whole number 1 or above")
    for name in told:
        tracking.make(name)
    made = [job._replace(track=tuple(told)) for job in made]
    experiments.require_fresh(made, resume)
    if (home / "config.toml").exists():
        raise FedslrError(f"out: {home} is the folder of a single run; choose another")
    with (
        locked(home),
        ManyDisplay(made) as display,
        reporting(Decoding(display.progress)),
        stop_on_signal(display.warn, ignore_afterwards=distributed.several()) as stopped,
    ):
        workers = jobs or experiments.default_workers()
        outcomes = experiments.execute(made, workers, display.show, stopped.__bool__, display.warn)
    if any(o.interrupted for o in outcomes):
        raise Interrupted(f"stopped; finished rounds are in {home}: go on with the same command and --resume")
    failed = [o for o in outcomes if o.error is not None]
    done = [job.folder for job, o in zip(made, outcomes, strict=True) if o.error is None]
    if done:
        asked = {job.folder for job in made}
        others = sorted(p.parent for p in home.glob("*/summary.json") if p.parent not in asked)
        runs = tables.find_runs([*done, *others])
        beside = tables.unfinished(sorted(asked))
        made_table, written = _tables(runs, pick, clients, beside)
        print_table(made_table)
        for format, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv")):
            write_durably(home / f"table.{suffix}", written[format].encode())
        _draw(runs, home / "accuracy.png", quiet=True)
        write_report([home], home / "report.html", pick, clients)
        made_here = "report.html, table.md, table.csv, table.tex, accuracy.png"
        if others:
            names = ", ".join(p.name for p in others)
            out_console.print(f"the table also has what earlier commands left here: {names}", soft_wrap=True)
        out_console.print(f"results in {home} ({made_here})", soft_wrap=True)
    if failed:
        reasons = "; ".join(f"{o.job}: {o.error}" for o in failed[:SEVERAL])
        more = f"; and {', '.join(str(o.job) for o in failed[SEVERAL:])}" if len(failed) > SEVERAL else ""
        raise FedslrError(f"{len(failed)} of {len(made)} runs failed; {reasons}{more}")


def _tables(
    runs: list[tables.Run], pick: str, clients: str, beside: list[tables.Run]
) -> tuple[tables.Table, dict[str, str]]:
    """The table of some runs, and the same in every format it is written in."""
    few = [run.folder.name for run in runs if pick == "late" and statistics.evaluations(run.records) < statistics.LATE]
    if few:
        warn(f"late: fewer than {statistics.LATE} evaluations, so the mean of all, in {', '.join(few)}")
    groups, figures = tables.group(runs, beside), tables.columns(pick, clients)
    made = tables.table(groups, figures)
    written = {
        "markdown": tables.markdown(made),
        "csv": tables.comma_separated(groups, figures),
        "latex": tables.latex(made),
    }
    return made, written


def _draw(runs: list[tables.Run], path: Path, quiet: bool = False) -> None:
    """Accuracy over rounds, one colour for each group of runs: the mean over its seeds."""
    report_commands.save(figures.accuracy(runs), path, quiet=quiet)


for command in (report_commands.report, report_commands.figures, report_commands.watch):
    app.command()(command)


@app.command()
def algorithms() -> None:
    """List the methods and their hyperparameters."""
    for name, cls in ALGORITHMS.items():
        out_console.print(f"{name}  {(cls.__doc__ or '').splitlines()[0]}", style="bold", soft_wrap=True)
        for option in schema.describe(cls):
            default = f"{option.default:g}" if isinstance(option.default, float) else option.default
            out_console.print(f"    {option.name} = {default}  {option.help} ({option.kind})", soft_wrap=True)


@app.command()
def recipe(
    method: Annotated[str, typer.Argument(help="The method it is for.", metavar="[METHOD]")] = "fedslr",
) -> None:
    """Print a recipe with every key, its default and what it means: a start for one of your own."""
    made = recipe_text.template(method)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        # Recipes are read as UTF-8, whatever this machine writes otherwise.
        sys.stdout.reconfigure(encoding="utf-8")
    typer.echo(made, nl=False)


shipping.mount(app)

app.add_typer(data.app, name="data")
app.add_typer(deploy.app, name="federation")
app.command("predict")(deploy.predict_command)


def main() -> None:
    """Run the command line; a user's mistake is answered with one line, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that has no Greek gets question marks, not a failure after hours of training.
            stream.reconfigure(errors="replace")
    _tell_warnings()
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except Interrupted as stop:
        _leave(str(stop), INTERRUPTED)
    except FedslrError as error:
        show_traceback(error)
        _leave(f"error: {error}", 2)
    except KeyboardInterrupt:
        trains = {"run", "compare", "sweep"}.intersection(sys.argv[1:2])
        _leave("stopped; go on from the last checkpoint with --resume" if trains else "stopped", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _leave(f"error: {error.filename or 'output'}: {error.strerror or error}", 2)
    except Exception as error:
        # What the command line's own parser raises knows its exit code and its message.
        message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
        if message is None or code is None:
            if told := failure(error) or plugins.own_mistake(error):
                show_traceback(error)
                _leave(f"error: {told}", 2)
            distributed.speaks()
            raise
        text = " ".join(message().split())
        _leave(f"error: {text} (see fedslr --help)" if text else "", code)


def _tell_warnings() -> None:
    """What the package warns of from Python is a line here; what others warn of is shown as Python shows it."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
        if issubclass(category, FedslrWarning):
            warn(str(message))
        else:
            usual(message, category, filename, *more, **named)

    warnings.showwarning = show


def _leave(line: str, code: int) -> None:
    if line and distributed.speaks():
        err_console.print(" ".join(line.split()))
    sys.exit(code)
