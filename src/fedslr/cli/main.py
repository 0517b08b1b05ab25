"""The command line. Exit codes: 0 done, 2 the request was wrong (one plain line), 1 a defect, 130 interrupted."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer
import typer.core

from fedslr.cli import (
    data_commands,
    experiment_commands,
    export_commands,
    federation_commands,
    method_commands,
    report_commands,
    run_commands,
)
from fedslr.cli.display import err_console, warn
from fedslr.core.errors import INTERRUPTED, FedslrWarning, Interrupted, show_traceback
from fedslr.core.version import __version__
from fedslr.engine import distributed
from fedslr.run.jobs import error_line

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
RESUMABLE_COMMANDS = {"run", "compare", "sweep"}


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


for command in (
    run_commands.run,
    experiment_commands.compare,
    experiment_commands.sweep,
    report_commands.show,
    report_commands.report,
    report_commands.figures,
    report_commands.watch,
    method_commands.algorithms,
    method_commands.recipe,
    export_commands.export,
    export_commands.latency,
):
    app.command()(command)
app.add_typer(data_commands.app, name="data")
app.add_typer(federation_commands.app, name="federation")
app.command("predict")(federation_commands.predict_command)


def main() -> None:
    """Run the command line; a user's mistake is answered with one line, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that has no Greek gets question marks, not a failure after hours of training.
            stream.reconfigure(errors="replace")
    _show_warnings_in_a_line()
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except Interrupted as stop:
        _leave(str(stop), INTERRUPTED)
    except KeyboardInterrupt:
        trains = RESUMABLE_COMMANDS.intersection(sys.argv[1:2])
        _leave("stopped; go on from the last checkpoint with --resume" if trains else "stopped", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        _leave_with(error)


def _leave_with(error: Exception) -> None:
    """Print one line about an error and exit; show the traceback of a defect of ours."""
    message, code = getattr(error, "format_message", None), getattr(error, "exit_code", None)
    if message is not None and code is not None:
        # An error of the parser of the command line, which has its own message and exit code.
        _leave(f"error: {message()} (see fedslr --help)" if message() else "", code)
    if line := error_line(error):
        show_traceback(error)
        _leave(f"error: {line}", 2)
    if isinstance(error, OSError):
        _leave(f"error: {error.filename or 'output'}: {error.strerror or error}", 2)
    distributed.speaks()
    raise error


def _show_warnings_in_a_line() -> None:
    """Print the package's own warnings as lines; Python shows the others as usual."""
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
