"""fedslr data list, fetch, verify and show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedslr.cli.arguments import AsJson
from fedslr.cli.display import decoding, out_console, warn
from fedslr.cli.printing import print_json
from fedslr.cli.report_commands import save
from fedslr.data import DATASETS, decoded_cache, downloads, load
from fedslr.report.label_skew import extremes, label_counts, skew, split_figure
from fedslr.report.number_text import percent
from fedslr.run.progress import err_console

app = typer.Typer(help="Download datasets, verify them, and show how they are split.", rich_markup_mode=None)
Root = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the datasets.")]
Published = Annotated[str, typer.Argument(metavar="DATASET", help="cifar10, cifar100 or tinyimagenet.")]


@app.command("list")
def list_datasets(root: Root = Path("data"), as_json: AsJson = False) -> None:
    """List the datasets and whether they are on the disk."""
    rows = [
        ("digits", "built in", "1,797 images of handwritten digits, 8×8"),
        ("diabetes", "built in", "disease progression of 442 patients, a regression"),
    ]
    for name, item in downloads.PUBLISHED.items():
        rows.append((name, "there" if (root / item.folder).is_dir() else "to be fetched", item.title))
    state = "there" if (root / "femnist").is_dir() else "made by LEAF"
    rows.append(("femnist", state, "handwritten characters by writer"))
    rows.append(("heart", "built in", "920 patients of four hospitals, with or without heart disease"))
    if as_json:
        print_json([dict(zip(("name", "state", "about"), row, strict=True)) for row in rows])
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in (*rows, ("npz:, imagefolder:, table:PATH, module:function", "your own", "see docs/start/own-data.md")):
        table.add_row(*row)
    out_console.print(table)


@app.command()
def fetch(
    name: Published,
    root: Root = Path("data"),
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE|URL", help="A file or another address, such as a mirror's.")
    ] = None,
) -> None:
    """Download, verify and unpack a dataset.

    Run the command again to continue a download that broke off.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err_console, disable=not err_console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        home = downloads.fetch(
            name, root, source, lambda done, total: progress.update(task, completed=done, total=total or None)
        )
    out_console.print(f"{name} is in {home}", soft_wrap=True)


@app.command()
def verify(name: Published, root: Root = Path("data")) -> None:
    """Read all files of a dataset, and report a missing or damaged one."""
    downloads.find(name)
    with decoding(), decoded_cache.bypass():
        loaded = DATASETS[name](root)
    out_console.print(f"{name} is complete: {len(loaded.x):,} training and {len(loaded.x_test):,} test images")


@app.command("show")
def show_split(
    name: Annotated[str, typer.Argument(metavar="[DATASET]", help="A dataset, as in a recipe's data.name.")] = "digits",
    split: Annotated[
        str, typer.Option(metavar="SPLIT", help="iid, dirichlet, pathological, quantity or authors.")
    ] = "dirichlet",
    alpha: Annotated[float, typer.Option(metavar="NUMBER", help="Concentration of the Dirichlet priors.")] = 0.1,
    clients: Annotated[int, typer.Option(metavar="NUMBER", help="Number of clients.")] = 100,
    seed: Annotated[int, typer.Option(metavar="SEED", help="Seed of the split.")] = 0,
    root: Root = Path("data"),
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="Draw the labels of every client to this PNG, PDF or SVG.")
    ] = Path("split.png"),
) -> None:
    """Draw how labels are split over clients.

    The command also prints how skewed the split is.
    """
    with decoding():
        federation = load(name, split=split, alpha=alpha, clients=clients, seed=seed, root=str(root), warn=warn)
    counts = label_counts(federation)
    found = skew(counts)
    out_console.print(f"{federation.name}: {len(federation.clients)} clients, {federation.num_classes} labels")
    out_console.print(f"a client's most frequent label has {percent(found['largest_share'])} of its samples")
    out_console.print(f"a client holds {found['labels_held']:.1f} labels")
    out_console.print(f"its labels are {percent(found['distance'])} away from all clients' (total variation)")
    out_console.print(extremes(counts))
    save(split_figure(federation), plot)
