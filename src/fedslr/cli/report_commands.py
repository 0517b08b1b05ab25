"""`fedslr show`, `report`, `figures` and `watch`: the commands that show runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedslr.cli.arguments import AsJson, Client, Clients, Pick, RunFolders, check_accuracy, require_known, split_words
from fedslr.cli.display import warn
from fedslr.cli.printing import print_json, print_table
from fedslr.core.errors import FedslrError
from fedslr.report import paper_figures
from fedslr.report.experiment_files import save_figure, table_in, warn_of_few_evaluations
from fedslr.report.html_report import write_report
from fedslr.report.live_report import HOST, ReportServer, received_signals
from fedslr.report.result_tables import columns, result_table
from fedslr.report.run_groups import group_runs
from fedslr.report.saved_runs import find_runs, unfinished_runs
from fedslr.run.representation import represent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = ("png", "pdf", "svg")


def show(
    folders: RunFolders,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw accuracy over rounds to this PNG, PDF or SVG.")
    ] = None,
    pick: Pick = "last",
    clients: Clients = "all",
    format: Annotated[str, typer.Option(metavar="FORMAT", help="text, markdown, csv or latex.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Put finished runs side by side.

    Figures are means ± standard deviations over seeds. With --json every run is printed, finished or not.
    """
    if as_json:
        found = find_runs(folders, unfinished=True)
        print_json([{"folder": str(run.folder), "finished": run.finished, **run.summary} for run in found])
        return
    check_accuracy(pick, clients)
    require_known("--format", format, ("text", "markdown", "csv", "latex"))
    if plot is not None:
        picture_kind(plot, "--plot")
    runs, unfinished = find_runs(folders), unfinished_runs(folders)
    warn_of_few_evaluations(runs, pick, warn)
    groups, shown = group_runs(runs, unfinished), columns(pick, clients)
    if format == "text":
        print_table(result_table(groups, shown))
    else:
        typer.echo(table_in(format, groups, shown), nl=False)
    if plot is not None:
        save(paper_figures.accuracy(runs), plot)
    if unfinished:
        warn(f"not in the table, since they are not finished: {', '.join(str(run.folder) for run in unfinished)}")


def report(
    folders: RunFolders,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file. Default: report.html in the folder, or here for several folders."),
    ] = None,
    pick: Pick = "last",
    clients: Clients = "all",
) -> None:
    """Write the HTML report of runs to one file.

    It shows a run, a comparison or a sweep, finished or not.
    """
    check_accuracy(pick, clients)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    write_report(folders, path, pick, clients)
    typer.echo(f"written to {path}")


def figures(
    folders: RunFolders,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the figures.")] = Path("figures"),
    only: Annotated[
        str | None, typer.Option(metavar="FIGURE,…", help=f"Some of them: {', '.join(paper_figures.FIGURES)}.")
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="FORMAT,…", help="pdf, png or svg, or several, separated by commas.")
    ] = "pdf,png",
    client: Client = None,
    bandwidth: Annotated[
        float, typer.Option(metavar="MBIT/S", help="communication: bandwidth of a client's connection.")
    ] = 10.0,
    latency: Annotated[
        float, typer.Option(metavar="MS", help="communication: milliseconds that a message takes to arrive.")
    ] = 20.0,
) -> None:
    """Draw the paper's figures from runs.

    The figures are accuracy, violin, t-SNE, communication time, sensitivity and their like. For t-SNE, the default
    client is the one with the most labels.
    """
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
        raise FedslrError("figures: nothing could be drawn from these runs; the lines above say why")


def watch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of runs that may still be training.")],
    port: Annotated[
        int, typer.Option(min=0, max=2**16 - 1, metavar="PORT", help="Port on this machine; 0 takes a free one.")
    ] = 8000,
) -> None:
    """Serve the live report of a run on this machine.

    The page is renewed after every round. Ctrl-C ends the server.
    """
    find_runs([folder], unfinished=True)
    with ReportServer(folder, port) as server:
        signals = received_signals()
        typer.echo(f"http://{HOST}:{server.server_port}/ shows {folder}; ctrl-C ends it")
        server.serve_until(signals)


def picture_kind(path: Path, option: str) -> str:
    """Return the format of a picture by its file's name."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        raise FedslrError(f"{option}: got '{path}', expected a file that ends in .png, .pdf or .svg")
    return kind


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file, in the format of its name."""
    picture_kind(path, "--plot")
    save_figure(figure, path)
    typer.echo(f"drawn to {path}")
