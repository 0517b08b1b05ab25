"""report.html: one file that shows a run, a comparison or a sweep, finished or not.

The file loads nothing. It is complete without JavaScript, which only adds values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from fedslr.core.durable import write_durably
from fedslr.core.version import __version__
from fedslr.report.accuracy_sections import accuracy_section, client_section, sensitivity_section
from fedslr.report.colours import DARK, PALETTE
from fedslr.report.cost_section import cost_section
from fedslr.report.label_section import label_section
from fedslr.report.model_size_section import model_size_section
from fedslr.report.report_headline import cards, notices, subtitle, title
from fedslr.report.report_view import View
from fedslr.report.result_tables import Column, columns, result_table
from fedslr.report.run_facts import run_facts
from fedslr.report.saved_runs import Run, find_runs
from fedslr.report.svg_axes import colour_class
from fedslr.storage import statistics

SECTIONS = (accuracy_section, sensitivity_section, client_section, model_size_section, cost_section, label_section)


class MarkedTable(NamedTuple):
    """The table of a page: cells with a mark on the best of some columns."""

    titles: list[str]
    rows: list[list[tuple[str, bool]]]
    labels: int


def marked_table(view: View, columns: Sequence[Column]) -> MarkedTable:
    made = result_table(view.groups, columns)
    best = [[False] * len(made.titles) for _ in made.rows]
    for n, column in enumerate(columns, start=made.labels):
        means = [column.figures(g.runs)[0] for g in view.groups]
        known = [m for m in means if m is not None]
        if view.several and known and column.title.endswith("%"):
            for row, mean in zip(best, means, strict=True):
                row[n] = mean == max(known)
    rows = [list(zip(cells, marks, strict=True)) for cells, marks in zip(made.rows, best, strict=True)]
    return MarkedTable(made.titles, rows, made.labels)


def report_page(runs: Sequence[Run], live: str | None = None, pick: str = "last", clients: str = "all") -> str:
    """Return the report of some runs; `live` is the stamp of a page that reloads itself when its runs go on."""
    view, figures = View(runs), columns(pick, clients)
    script = _page_part("report.js") + (_page_part("watch.js") if live is not None else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_page_part("report.html"))
    single = view.groups[0].runs[0] if len(view.runs) == 1 else None
    return template.render(
        title=title(view),
        subtitle=subtitle(view),
        notices=notices(view, pick, clients),
        cards=cards(view, figures),
        legend=[(i, g.name, colour_class(look), look.again) for i, g, look in view.numbered()] if view.several else [],
        sections=[section for section in (make(view) for make in SECTIONS) if section.figures],
        table=marked_table(view, figures),
        whose="the clients sampled then" if clients == "sampled" else "all clients",
        rows=_facts(single, pick, clients) if single and single.finished else [],
        runs=view.runs,
        version=__version__,
        live=live,
        palette=list(zip(PALETTE, DARK, strict=True)),
        # Our own files need no escaping.
        style=Markup(_page_part("report.css")),
        script=Markup(script),
        digest=digest,
    )


def _facts(run: Run, pick: str, clients: str) -> list[tuple[str, str, str]]:
    summary = run.summary | {"accuracy": statistics.accuracy(run.records, pick, clients)}
    return run_facts(summary, run.records, 8 if run.config.get("dtype") == "float64" else 4)


def _page_part(name: str) -> str:
    return files("fedslr.report").joinpath(name).read_text("utf-8")


def write_report(folders: Sequence[Path], out: Path, pick: str = "last", clients: str = "all") -> None:
    """Write the report of all runs in some folders; `pick` and `clients` choose its accuracies as in `columns`."""
    runs = find_runs(folders, unfinished=True)
    write_durably(out, report_page(runs, pick=pick, clients=clients).encode())
