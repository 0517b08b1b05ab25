"""report.html: one file that shows a run, a comparison or a sweep, finished or not.

The file loads nothing. It is complete without JavaScript, which adds values under the pointer and sorts tables.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from fedslr.core.durable import write_durably
from fedslr.core.version import __version__
from fedslr.report.accuracy_sections import accuracy_section, client_section, sensitivity_section
from fedslr.report.certainty import separable_best
from fedslr.report.colours import DARK, PALETTE
from fedslr.report.cost_section import cost_section
from fedslr.report.label_section import label_section
from fedslr.report.model_size_section import model_size_section
from fedslr.report.report_headline import cards, notices, subtitle, title
from fedslr.report.report_view import View
from fedslr.report.result_tables import result_table
from fedslr.report.run_facts import run_facts
from fedslr.report.saved_runs import Run, find_runs
from fedslr.report.svg_axes import colour_class, html_table, sortable_cell, sortable_head, tag
from fedslr.storage import statistics

SECTIONS = (accuracy_section, sensitivity_section, client_section, model_size_section, cost_section, label_section)


def _results(view: View) -> Markup:
    """Return the table of all results; bold is the best value of a column, if seeds separate it from all others."""
    columns = list(view.columns.values())
    made = result_table(view.groups, columns)
    body = []
    best = [separable_best(view.groups, c.goodness) if c.sign else None for c in columns]
    for place, (group, row) in enumerate(zip(view.groups, made.rows, strict=True)):
        cells = [sortable_cell(text, "name") for text in row[: made.labels]]
        for text, column, winner in zip(row[made.labels :], columns, best, strict=True):
            mean = column.figures(group.runs)[0]
            shown = tag("b", text) if group is winner else text
            cells.append(sortable_cell(shown if mean is None else (shown, mean)))
        body.append(tag("tr", *cells, class_=f"g{place}"))
    return html_table(list(map(sortable_head, made.titles)), body)


def report_page(runs: Sequence[Run], live: str | None = None, pick: str = "last", clients: str = "all") -> str:
    """Return the report of some runs; `live` is the stamp of a page that reloads itself when its runs go on."""
    view = View(runs, pick, clients)
    script = _page_part("report.js") + (_page_part("watch.js") if live is not None else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_page_part("report.html"))
    single = view.groups[0].runs[0] if len(view.runs) == 1 else None
    return template.render(
        title=title(view),
        subtitle=subtitle(view),
        notices=notices(view),
        cards=cards(view),
        legend=[(i, g.name, colour_class(look), look.again) for i, g, look in view.numbered()] if view.several else [],
        sections=[section for section in (make(view) for make in SECTIONS) if section.figures or section.tables],
        results=_results(view),
        averaged="the clients sampled then" if clients == "sampled" else "all clients",
        facts=_facts(single, pick, clients) if single and single.finished else [],
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
    summary = run.summary | {run.metric.name: statistics.mean_over_clients(run.records, pick, clients, run.metric)}
    return run_facts(summary, run.records, run.metric, 8 if run.config.get("dtype") == "float64" else 4)


def _page_part(name: str) -> str:
    return files("fedslr.report").joinpath(name).read_text("utf-8")


def write_report(
    folders: str | Path | Sequence[str | Path], out: str | Path, pick: str = "last", clients: str = "all"
) -> None:
    """Write the HTML report of runs to one file.

    Args:
        folders: One or more folders of runs, or folders that hold such folders. The runs may be unfinished.
        out: The file.
        pick: The accuracy of the "last", the "best" or the "late" (last five) evaluations.
        clients: The accuracy over "all" clients or over those "sampled" in that round.

    Raises:
        FedslrError: A folder holds no run.

    Example:
        fedslr.write_report(["runs/one", "runs/two"], "report.html")
    """
    listed = [folders] if isinstance(folders, str | Path) else folders
    runs = find_runs([Path(folder) for folder in listed], unfinished=True)
    write_durably(Path(out), report_page(runs, pick=pick, clients=clients).encode())
