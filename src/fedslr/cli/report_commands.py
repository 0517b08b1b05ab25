"""The commands that show runs: report, figures, watch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedslr.cli.arguments import Clients, Pick, check_choices, require_file
from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError, suggest
from fedslr.report import figures as drawing
from fedslr.report import page, tables, watching
from fedslr.run.representation import represent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold such.")]
FORMATS = ("png", "pdf", "svg")


def report(
    folders: Folders,
    out: Annotated[
        Path | None, typer.Option(help="The file. Default: report.html in the folder, or here if there are several.")
    ] = None,
    pick: Pick = "last",
    clients: Clients = "all",
) -> None:
    """Write report.html: one file that shows a run, a comparison or a sweep, finished or not."""
    check_choices(pick, clients)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if out is not None:
        require_file("--out", out, "report.html")
    page.write_report(folders, path, pick, clients)
    typer.echo(f"written to {path}")


def figures(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
    only: Annotated[str | None, typer.Option(help=f"Some of them: {','.join(drawing.FIGURES)}.")] = None,
    format: Annotated[str, typer.Option(help="pdf, png or svg, or several, separated by commas.")] = "pdf,png",
    client: Annotated[int | None, typer.Option(help="tsne: whose samples. Default: who has the most labels.")] = None,
    bandwidth: Annotated[float, typer.Option(help="communication: Mbit/s of a client's line.")] = 10.0,
    latency: Annotated[float, typer.Option(help="communication: milliseconds that a message is under way.")] = 20.0,
) -> None:
    """Draw the paper's figures for papers: accuracy, violin, t-SNE, communication time, sensitivity."""
    names = _choices("--only", only, list(drawing.FIGURES)) if only is not None else list(drawing.FIGURES)
    suffixes = _choices("--format", format, FORMATS)
    options = drawing.Options(client, bandwidth, latency, represent, lambda text: typer.echo(f"left out: {text}"))
    drawing.check(options)
    runs = tables.find_runs(folders, unfinished=True)
    drawn = 0
    for name in names:
        try:
            figure = drawing.FIGURES[name](runs, options)
        except FedslrError as error:
            if only is not None:
                raise
            typer.echo(f"left out: {error}")
            continue
        drawn += 1
        for suffix in suffixes:
            save(figure, out / f"{name}.{suffix}", "--out")
    if not drawn:
        raise FedslrError("figures: nothing could be drawn from these runs")


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of several, that may still be under way.")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.")] = 8000,
) -> None:
    """Serve the report of a run on this machine, renewed as rounds come in. Ctrl-C ends it."""
    if not 0 <= port < 2**16:
        raise FedslrError(f"--port: got {port}, expected a whole number from 0 to {2**16 - 1}")
    tables.find_runs([folder], unfinished=True)
    with watching.serving(folder, port) as server, watching.until_told():
        typer.echo(f"http://{watching.HOST}:{server.server_port}/ shows {folder}; ctrl-C ends it")
        server.serve_forever(poll_interval=0.2)


def _choices(option: str, given: str, known: list[str] | tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(word.strip() for word in given.split(",") if word.strip()))
    if not names:
        raise FedslrError(f"{option}: got none, expected some of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise FedslrError(f"{option}: got '{name}', which is none; {suggest(name, known)}")
    return names


def kind_of(path: Path, option: str) -> str:
    """What kind of picture a file is to be, by its name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise FedslrError(f"{option}: got '{path}', expected a file that ends in .png, .pdf or .svg")
    return kind


def save(figure: Figure, path: Path, option: str = "--plot", quiet: bool = False) -> None:
    """Write a figure to a file whose name says its kind; one that is there is replaced as a whole or not at all."""
    kind = kind_of(path, option)
    made = io.BytesIO()
    try:
        figure.savefig(made, format=kind, dpi=150)
    except ValueError as error:
        raise FedslrError(f"{option}: cannot draw {path}: {error}") from None
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, made.getbuffer())
    if not quiet:
        typer.echo(f"drawn to {path}")
