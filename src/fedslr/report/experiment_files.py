"""The files beside the runs of a comparison or a sweep: tables, a figure and the report."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedslr.core.durable import disk_errors, write_durably
from fedslr.report import paper_figures, table_formats
from fedslr.report.html_report import write_report
from fedslr.report.result_tables import Column, Table, columns, result_table
from fedslr.report.run_groups import Group, group_runs
from fedslr.report.saved_runs import Run, find_runs, unfinished_runs
from fedslr.storage import statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = {"markdown": "md", "latex": "tex", "csv": "csv"}


def table_in(format: str, groups: Sequence[Group], shown: Sequence[Column]) -> str:
    """Return the table of some groups as text, markdown, csv or latex."""
    if format == "csv":
        return table_formats.comma_separated(groups, shown)
    return table_formats.FORMATS[format](result_table(groups, shown))


def warn_of_few_evaluations(runs: Sequence[Run], pick: str, warn: Callable[[str], None]) -> None:
    """Warn if "late" averages over fewer evaluations than it should."""
    least = statistics.LATE_EVALUATIONS
    few = [run.folder.name for run in runs if pick == "late" and statistics.evaluations(run.records) < least]
    if few:
        warn(f"late: fewer than {least} evaluations, so the mean of all, in {', '.join(few)}")


def write_experiment(
    home: Path, asked: Sequence[Path], done: Sequence[Path], pick: str, clients: str, warn: Callable[[str], None]
) -> tuple[Table, list[Path]]:
    """Write the files beside some runs.

    Args:
        home: The folder of the runs.
        asked: The folders of all runs of this experiment.
        done: Those of the finished ones.
        pick: The accuracies of the table, as in `columns`.
        clients: The clients that they average over.
        warn: Receives warnings.

    Returns:
        The table, and the folders of runs in it that belong to earlier experiments.
    """
    others = sorted(p.parent for p in home.glob("*/summary.json") if p.parent not in asked)
    runs = find_runs([*done, *others])
    warn_of_few_evaluations(runs, pick, warn)
    groups, shown = group_runs(runs, unfinished_runs(sorted(asked))), columns(pick, clients)
    for format, suffix in SUFFIXES.items():
        write_durably(home / f"table.{suffix}", table_in(format, groups, shown).encode())
    save_figure(paper_figures.accuracy(runs), home / "accuracy.png")
    write_report([home], home / "report.html", pick, clients)
    return result_table(groups, shown), others


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file, in the format of its name."""
    made = io.BytesIO()
    figure.savefig(made, format=path.suffix.lower().removeprefix("."), dpi=150)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, made.getbuffer())
