"""`fedslr show`, `report`, `figures` and `watch`: the commands that show runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedslr.cli.arguments import Clients, Pick, check_accuracy, require_known, split_words
from fedslr.cli.display import warn
from fedslr.cli.printing import print_table
from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError
from fedslr.report import paper_figures
from fedslr.report.html_report import write_report
from fedslr.report.live_report import HOST, ReportServer, received_signals
from fedslr.report.result_tables import Table, columns, result_table
from fedslr.report.run_groups import group_runs
from fedslr.report.saved_runs import Run, find_runs, unfinished_runs
from fedslr.report.table_formats import comma_separated, latex, markdown
from fedslr.run.representation import represent
from fedslr.storage import statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold such.")]
PICTURES = ("png", "pdf", "svg")


def show(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs, or folders that hold such.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw accuracy over rounds to this PNG, PDF or SVG.")] = None,
    pick: Pick = "last",
    clients: Clients = "all",
    format: Annotated[str, typer.Option(help="text, markdown, csv or latex.")] = "text",
) -> None:
    """Put finished runs side by side: mean ± standard deviation over seeds."""
    check_accuracy(pick, clients)
    require_known("--format", format, ("text", "markdown", "csv", "latex"))
    if plot is not None:
        picture_kind(plot, "--plot")
    runs, unfinished = find_runs(folders), unfinished_runs(folders)
    table, texts = table_texts(runs, pick, clients, unfinished)
    if format == "text":
        print_table(table)
    else:
        typer.echo(texts[format], nl=False)
    if plot is not None:
        save(paper_figures.accuracy(runs), plot)
    if unfinished:
        warn(f"not in the table, since they are not finished: {', '.join(str(run.folder) for run in unfinished)}")


def report(
    folders: Folders,
    out: Annotated[
        Path | None, typer.Option(help="The file. Default: report.html in the folder, or here if there are several.")
    ] = None,
    pick: Pick = "last",
    clients: Clients = "all",
) -> None:
    """Write report.html: one file that shows a run, a comparison or a sweep, finished or not."""
    check_accuracy(pick, clients)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    write_report(folders, path, pick, clients)
    typer.echo(f"written to {path}")


def figures(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures"),
    only: Annotated[str | None, typer.Option(help=f"Some of them: {','.join(paper_figures.FIGURES)}.")] = None,
    format: Annotated[str, typer.Option(help="pdf, png or svg, or several, separated by commas.")] = "pdf,png",
    client: Annotated[
        str | None,
        typer.Option(help="tsne: number or name of the client. Default: the client with the most labels."),
    ] = None,
    bandwidth: Annotated[float, typer.Option(help="communication: Mbit/s of a client's line.")] = 10.0,
    latency: Annotated[float, typer.Option(help="communication: milliseconds that a message is under way.")] = 20.0,
) -> None:
    """Draw the paper's figures for papers: accuracy, violin, t-SNE, communication time, sensitivity."""
    names = list(paper_figures.FIGURES) if only is None else split_words(only)
    suffixes = split_words(format)
    for name in names:
        require_known("--only", name, paper_figures.FIGURES)
    for suffix in suffixes:
        require_known("--format", suffix, PICTURES)
    options = paper_figures.Options(client, bandwidth, latency, represent, lambda text: typer.echo(f"left out: {text}"))
    paper_figures.check(options)
    runs = find_runs(folders, unfinished=True)
    drawn = 0
    for name in names:
        try:
            figure = paper_figures.FIGURES[name](runs, options)
        except FedslrError as error:
            if only is not None:
                raise
            typer.echo(f"left out: {error}")
            continue
        drawn += 1
        for suffix in suffixes:
            save(figure, out / f"{name}.{suffix}")
    if not drawn:
        raise FedslrError("figures: nothing could be drawn from these runs")


def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of several, that may still be under way.")],
    port: Annotated[int, typer.Option(min=0, max=2**16 - 1, help="Port on this machine; 0 takes a free one.")] = 8000,
) -> None:
    """Serve the report of a run on this machine, renewed as rounds come in. Ctrl-C ends it."""
    find_runs([folder], unfinished=True)
    with ReportServer(folder, port) as server:
        signals = received_signals()
        typer.echo(f"http://{HOST}:{server.server_port}/ shows {folder}; ctrl-C ends it")
        server.serve_until(signals)


def table_texts(runs: list[Run], pick: str, clients: str, unfinished: list[Run]) -> tuple[Table, dict[str, str]]:
    """Return the table of some runs, and its text in every format."""
    least = statistics.LATE_EVALUATIONS
    few = [run.folder.name for run in runs if pick == "late" and statistics.evaluations(run.records) < least]
    if few:
        warn(f"late: fewer than {least} evaluations, so the mean of all, in {', '.join(few)}")
    groups, shown = group_runs(runs, unfinished), columns(pick, clients)
    table = result_table(groups, shown)
    return table, {
        "markdown": markdown(table),
        "csv": comma_separated(groups, shown),
        "latex": latex(table),
    }


def picture_kind(path: Path, option: str) -> str:
    """Return the format of a picture by its file's name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        raise FedslrError(f"{option}: got '{path}', expected a file that ends in .png, .pdf or .svg")
    return kind


def save(figure: Figure, path: Path, quiet: bool = False) -> None:
    """Write a figure to a file, in the format of its name."""
    made = io.BytesIO()
    figure.savefig(made, format=picture_kind(path, "--plot"), dpi=150)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, made.getbuffer())
    if not quiet:
        typer.echo(f"drawn to {path}")
