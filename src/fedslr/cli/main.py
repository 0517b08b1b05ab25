"""The command line. Exit codes: 0 done, 2 the request was wrong (one plain line), 1 a defect, 130 interrupted."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import click
import typer
import typer.core

from fedslr.algorithms import FedSLR
from fedslr.cli import (
    data_commands,
    doctor,
    experiment_commands,
    export_commands,
    federation_commands,
    report_commands,
    run_commands,
)
from fedslr.cli.display import warn
from fedslr.core.errors import INTERRUPTED, FedslrWarning, Interrupted, file_reason, show_traceback
from fedslr.core.version import __version__
from fedslr.engine import distributed
from fedslr.run.jobs import error_line
from fedslr.run.progress import err_console
from fedslr.run.recipe_text import paths_of

# Help is plain text; before 0.21 typer escapes brackets for rich in it wherever rich is installed.
typer.core.HAS_RICH = False

app = typer.Typer(
    help="Personalized federated learning: a low-rank global model plus a sparse personal part per client.",
    invoke_without_command=True,
    context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RESUMABLE_COMMANDS = {"run", "compare", "sweep", "demo"}
KEYS_BY_OTHER_NAMES = {
    "algorithm": "algorithm.name",
    "method": "algorithm.name",
    "data": "data.name",
    "dataset": "data.name",
    "model": "model.name",
    "clients": "data.clients",
    "learning_rate": "lr",
}
"""The keys of a recipe by the names of options that users expect."""


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


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": experiment_commands.demo,
    "run": run_commands.run,
    "compare": experiment_commands.compare,
    "sweep": experiment_commands.sweep,
    "show": report_commands.show,
    "report": report_commands.report,
    "figures": report_commands.figures,
    "watch": report_commands.watch,
    "algorithms": run_commands.algorithms,
    "recipes": run_commands.list_recipes,
    "recipe": run_commands.recipe,
    "export": export_commands.export,
    "latency": export_commands.latency,
    "predict": federation_commands.predict_command,
    "doctor": doctor.doctor,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(data_commands.app, name="data")
app.add_typer(federation_commands.app, name="federation")


def main() -> None:
    """Run the command line; a user's mistake is answered with one line, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that has no Greek gets question marks, not a failure after hours of training.
            stream.reconfigure(errors="replace")
    _show_warnings_in_a_line()
    try:
        code = app(prog_name="fedslr", standalone_mode=False)
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
    if isinstance(error, click.ClickException):
        # An error of the parser of the command line, which has its own message and exit code.
        message, change = error.format_message(), _meant_change(error)
        if change is not None:
            # The parser suggests options that are spelt alike; the recipe's key is what was meant.
            message = error.message
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "fedslr"
        _leave(
            f"error: {message.rstrip('.')} ({change or f'see {command} --help'})" if message else "", error.exit_code
        )
    if line := error_line(error):
        show_traceback(error)
        _leave(f"error: {line}", 2)
    if isinstance(error, OSError):
        _leave(f"error: {error.filename or 'output'}: {file_reason(error)}", 2)
    distributed.claim_last_word()
    raise error


def _meant_change(error: click.ClickException) -> str | None:
    """Return the change of the recipe's key that an unknown option names, or None."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption) and context and any(p.name == "changes" for p in context.command.params):
        name = error.option_name.lstrip("-").replace("-", "_")
        key = KEYS_BY_OTHER_NAMES.get(name, name)
        if paths_of(key, FedSLR):
            return f"{key} is a key of the recipe: --set {key}={_value_of(error.option_name)}"
    return None


def _value_of(option: str) -> str:
    """Return the value that was given to an option on the command line."""
    words = sys.argv[1:]
    for word, after in zip(words, [*words[1:], "VALUE"], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return "VALUE"


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
    if line and distributed.claim_last_word():
        err_console.print(" ".join(line.split()))
    sys.exit(code)
