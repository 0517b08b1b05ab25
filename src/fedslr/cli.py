"""The command line. Exit codes: 0 done, 2 the request was wrong (one plain line), 1 a defect, 130 interrupted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fedslr
from fedslr import api, config, report, schema
from fedslr.algorithms import ALGORITHMS
from fedslr.data import share_out
from fedslr.errors import FedslrError, Interrupted
from fedslr.record import Record

app = typer.Typer(
    help="Personalized federated learning: a low-rank global model plus a sparse personal part per client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out_console = Console(highlight=False)
err_console = Console(stderr=True, highlight=False, soft_wrap=True)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedslr {fedslr.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Personalized federated learning."""


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe, such as recipes/demo.toml.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, dotted for tables. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run. Default: runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    diagnostics: Annotated[
        bool, typer.Option("--diagnostics", help="Record the convergence theory's quantities on evaluation rounds.")
    ] = False,
) -> None:
    """Run a recipe; results go to a folder, and an interrupted run can be resumed."""
    request = config.read(recipe, changes or [])
    if diagnostics:
        request = replace(request, settings=replace(request.settings, diagnostics=True))
    folder = out or Path("runs") / recipe.stem
    with _Display(request.settings.rounds) as display, _stop_on_signal(display) as stopped:
        try:
            result = api.run(
                request.algorithm,
                share_out(request.data),
                request.model.name,
                out=folder,
                resume=resume,
                on_round=display.show,
                should_stop=stopped.__bool__,
                warn=display.warn,
                config=request.to_toml(),
                **asdict(request.settings),
            )
        except Interrupted as stop:
            raise Interrupted(f"{stop}; go on with: {_again(recipe, changes or [], folder)}") from None
    _print_summary(result.summary, result.records, request.settings.torch_dtype().itemsize)
    out_console.print(f"results in {folder} (look at {folder / 'report.html'})", soft_wrap=True)


def _again(recipe: Path, changes: list[str], folder: Path) -> str:
    return " ".join(["fedslr run", str(recipe), *(f"--set {c}" for c in changes), f"--out {folder} --resume"])


@app.command()
def show(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw accuracy over rounds to this PNG, PDF or SVG.")] = None,
) -> None:
    """Put finished runs side by side."""
    runs = [report.read_run(folder) for folder in folders]
    table = Table(box=None, pad_edge=False)
    for column in ("run", "method", "global", "personal", "parameters (global / personal)", "down", "up"):
        table.add_column(column, justify="left" if column in ("run", "method") else "right")
    for folder, (summary, _) in zip(folders, runs, strict=True):
        sizes, sent = summary["parameters"], summary["bytes"]
        table.add_row(
            folder.name,
            summary["algorithm"],
            report.percent(summary["accuracy"]["global"]),
            report.percent(summary["accuracy"]["personal"]),
            f"{sizes['global']:,} / {sizes['personal']:,.0f} of {sizes['dense']:,}",
            report.amount(sent["down"]),
            report.amount(sent["up"]),
        )
    out_console.print(table)
    if plot is not None:
        names = {f"{s['algorithm']} ({f.name})" if _repeats(runs, s) else s["algorithm"]: r
                 for f, (s, r) in zip(folders, runs, strict=True)}  # fmt: skip
        try:
            report.accuracy_figure(names).savefig(plot, dpi=150)
        except (OSError, ValueError) as error:
            raise FedslrError(f"--plot: cannot write {plot}: {error}") from None
        out_console.print(f"drawn to {plot}", soft_wrap=True)


def _repeats(runs: list[tuple[dict[str, Any], list[dict[str, Any]]]], summary: dict[str, Any]) -> bool:
    return [s["algorithm"] for s, _ in runs].count(summary["algorithm"]) > 1


@app.command()
def algorithms() -> None:
    """List the methods and their hyperparameters."""
    for name, cls in ALGORITHMS.items():
        out_console.print(f"[bold]{name}[/]  {(cls.__doc__ or '').splitlines()[0]}", soft_wrap=True)
        for option in schema.describe(cls):
            out_console.print(
                f"    {option.name} = {option.default:g}  {option.help} ({option.kind})", soft_wrap=True, markup=False
            )


class _Display:
    """Live progress on a terminal; a line per evaluation elsewhere."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.down = self.up = 0
        self.accuracy = ""
        self.progress = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=err_console,
            disable=not err_console.is_terminal,
        )
        self.task = self.progress.add_task("rounds", total=rounds, status="")

    def __enter__(self) -> _Display:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def warn(self, text: str) -> None:
        err_console.print(f"warning: {text}", markup=False)

    def show(self, record: Record) -> None:
        self.down += record.bytes_down
        self.up += record.bytes_up
        if record.accuracy_personal is not None:
            shared, own = report.percent(record.accuracy_global), report.percent(record.accuracy_personal)
            self.accuracy = f"global {shared}  personal {own}"
        rank = f"  rank {sum(record.rank.values())}" if record.rank else ""
        status = f"{self.accuracy}{rank}  down {report.amount(self.down)}  up {report.amount(self.up)}"
        self.progress.update(self.task, completed=record.round, status=status)
        if self.progress.disable and record.accuracy_personal is not None:
            err_console.print(f"round {record.round}/{self.rounds}  {status}")


class _Stop:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def _stop_on_signal(display: _Display) -> Iterator[_Stop]:
    """Ctrl-C or SIGTERM ends the run after the round it is in; a second time, at once."""
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        display.warn("stopping after this round; once more to stop at once")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_summary(summary: dict[str, Any], records: list[dict[str, Any]], width: int) -> None:
    table = Table(
        title=f"{summary['algorithm']} on {summary['dataset']}",
        box=None,
        title_justify="left",
        pad_edge=False,
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in report.table_rows(summary, records, width):
        table.add_row(*row)
    out_console.print(table)


def main() -> None:
    """Run the command line; a user's mistake is answered with one line, never a traceback."""
    try:
        app(standalone_mode=False)
    except Interrupted as stop:
        _leave(str(stop), 130)
    except FedslrError as error:
        _leave(f"error: {error}", 2)
    except KeyboardInterrupt:
        _leave("stopped; go on from the last checkpoint with --resume", 130)
    except Exception as error:
        # What the command line's own parser raises knows its exit code and its message.
        message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
        if message is None or code is None:
            raise
        text = " ".join(message().split())
        _leave(f"error: {text} (see fedslr --help)" if text else "", code)


def _leave(line: str, code: int) -> None:
    if line:
        err_console.print(" ".join(line.split()), markup=False)
    sys.exit(code)
