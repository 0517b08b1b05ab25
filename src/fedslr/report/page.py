"""report.html: one file that shows a run, a comparison or a sweep, finished or not.

It needs nothing from elsewhere and is whole without JavaScript, which only adds values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from fedslr.core.durable import write_durably
from fedslr.core.version import __version__
from fedslr.report import amount, charts, mean_over, percent, plural, sections, table_rows, tables
from fedslr.report.colours import DARK, PALETTE
from fedslr.report.sections import SPARSE, View, count
from fedslr.report.tables import Column, Run
from fedslr.storage import statistics


class Card(NamedTuple):
    """One figure that stands for the whole."""

    value: str
    what: str
    note: str


# --- words ----------------------------------------------------------------------------------------------------------


def title(view: View) -> str:
    """What the page is about."""
    methods = list(dict.fromkeys(str(r.summary["algorithm"]) for g in view.groups for r in g.runs))
    data = ", ".join(dict.fromkeys(str(r.summary["dataset"]) for r in view.runs))
    if not view.several:
        return f"{methods[0]} on {data}"
    keys = list(view.groups[0].labels)
    if keys == ["method"]:
        return f"{' and '.join(methods) if len(methods) == 2 else f'{len(methods)} methods'} on {data}"
    who = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    return f"{who} on {data}, by {' and '.join(k for k in keys if k != 'method')}"


def subtitle(view: View) -> str:
    numbers = {r.summary.get("clients") for r in view.runs}
    number = numbers.pop() if len(numbers) == 1 else None
    seeds = sorted({r.config.get("seed", 0) for r in view.runs}, key=str)
    rounds = max(r.summary["rounds"] for r in view.runs)
    parts = [plural(number, "client") if isinstance(number, int) and number else "", plural(rounds, "round")]
    parts.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
    if len(view.runs) > 1:
        parts.append(f"{len(view.runs)} runs")
    return ", ".join(p for p in parts if p)


ASKED = {
    "best": "of the best evaluation of every run, not of its last (--pick best)",
    "late": "means of the last five evaluations of every run, not those of its last (--pick late)",
    "sampled": "of the clients sampled in the evaluated round, not of all (--clients sampled)",
}
"""Choices of a table that are not the usual ones."""


def notices(view: View, pick: str = "last", clients: str = "all") -> list[str]:
    """What a reader must know before believing a page."""
    asked, told = [ASKED[choice] for choice in (pick, clients) if choice in ASKED], []
    if asked:
        told.append(
            f"Accuracies in the figures on top and in the table are {' and '.join(asked)}. Charts are of all "
            "clients, those by client of the last evaluation."
        )
    for run in view.runs:
        if not run.finished:
            done, planned = run.summary["rounds"], run.config.get("rounds", "?")
            what = f"{run.folder.name}: " if len(view.runs) > 1 else ""
            counts = any(run is r for g in view.groups for r in g.runs)
            aside = "" if counts else " It counts neither in the curves nor in the table: other seeds are finished."
            told.append(
                f"{what}not finished: {done} of {planned} rounds are there. Unless it is still running, go on with the "
                f"command that began it and --resume.{aside}"
            )
    if not any(r.get("accuracy_personal") is not None for run in view.runs for r in run.records):
        told.append("Nothing has been evaluated yet, so there are no accuracies.")
    return told


def cards(view: View, columns: Sequence[Column]) -> list[Card]:
    figures = {column.key: column for column in columns}
    return _best(view, figures) if view.several else _headline(view.groups[0].runs, figures)


def _headline(runs: Sequence[Run], figures: Mapping[str, Column]) -> list[Card]:
    """The figures of one method; means over its seeds."""

    def mean(*keys: str) -> float | None:
        values = []
        for run in runs:
            value: Any = run.summary
            for key in keys:
                value = value.get(key) if value is not None else None
            values.append(value)
        return None if any(v is None for v in values) else fmean(values)

    own, shared = (figures[f"accuracy_{model}"].figures(runs)[0] for model in ("personal", "global"))
    dense, size, personal = (mean("parameters", key) for key in ("dense", "global", "personal"))
    down, up = mean("bytes", "down") or 0, mean("bytes", "up") or 0
    over = mean_over(runs[0].records)
    found = [Card(percent(own), "accuracy of the personal models", over)] if own is not None else []
    if shared is not None:
        found.append(Card(percent(shared), "accuracy of the global model", over))
    if dense and size:
        found.append(
            Card(percent(size / dense), "size of the global model", f"{count(size)} of {count(dense)} numbers")
        )
    if dense and size and personal and runs[0].summary["algorithm"] in SPARSE:
        zeros = 1 - (personal - size) / dense
        found.append(Card(percent(zeros), "zeros in the personal parts", f"{count(personal - size)} numbers are left"))
    if down or up:
        found.append(Card(amount(down + up), "sent in all", f"{amount(down)} down, {amount(up)} up"))
    return found


def _best(view: View, figures: Mapping[str, Column]) -> list[Card]:
    """Who is first in what."""

    def first(key: str, what: str, largest: bool) -> list[Card]:
        column = figures[key]
        scored = [(column.figures(g.runs)[0], g) for g in view.groups]
        known = [(v, g) for v, g in scored if v]
        if not known:
            return []
        value, group = (max if largest else min)(known, key=lambda pair: pair[0])
        unit = " %" if "accuracy" in key or "decile" in key else ""
        return [Card(column.show(value) + unit, what, group.name)]

    return [
        *first("accuracy_personal", "best accuracy of personal models", True),
        *first("accuracy_global", "best accuracy of a global model", True),
        *first("worst_decile_personal", "best accuracy for the tenth served worst", True),
        *first("parameters_personal", "smallest personal models", False),
    ]


class Overview(NamedTuple):
    """A table as the page has it: the best of some columns are emphasised."""

    titles: list[str]
    rows: list[list[tuple[str, bool]]]
    labels: int


def overview(view: View, columns: Sequence[Column]) -> Overview:
    made = tables.table(view.groups, columns)
    best = [[False] * len(made.titles) for _ in made.rows]
    for n, column in enumerate(columns, start=made.labels):
        means = [column.figures(g.runs)[0] for g in view.groups]
        known = [m for m in means if m is not None]
        if view.several and known and column.title.endswith("%"):
            for row, mean in zip(best, means, strict=True):
                row[n] = mean == max(known)
    rows = [list(zip(cells, marks, strict=True)) for cells, marks in zip(made.rows, best, strict=True)]
    return Overview(made.titles, rows, made.labels)


# --- the file -------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Run], live: str | None = None, pick: str = "last", clients: str = "all") -> str:
    """The report of some runs; `live` is the stamp of a page that looks for newer ones."""
    view, columns = View(runs), tables.columns(pick, clients)
    script = _part("report.js") + (_part("watch.js") if live is not None else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_part("report.html"))
    single = view.groups[0].runs[0] if len(view.runs) == 1 else None
    return template.render(
        title=title(view),
        subtitle=subtitle(view),
        notices=notices(view, pick, clients),
        cards=cards(view, columns),
        legend=[(i, g.name, charts.paint(look), look.again) for i, g, look in view.each()] if view.several else [],
        sections=sections.all_of(view),
        table=overview(view, columns),
        whose="the clients sampled then" if clients == "sampled" else "all clients",
        rows=_facts(single, pick, clients) if single and single.finished else [],
        runs=view.runs,
        version=__version__,
        live=live,
        palette=list(zip(PALETTE, DARK, strict=True)),
        # Our own files, as they are.
        style=Markup(_part("report.css")),
        script=Markup(script),
        digest=digest,
    )


def _facts(run: Run, pick: str, clients: str) -> list[tuple[str, str, str]]:
    summary = run.summary | {"accuracy": statistics.accuracy(run.records, pick, clients)}
    return table_rows(summary, run.records, 8 if run.config.get("dtype") == "float64" else 4)


def _part(name: str) -> str:
    return files("fedslr.report").joinpath(name).read_text("utf-8")


def write_report(folders: Sequence[Path], out: Path, pick: str = "last", clients: str = "all") -> None:
    """The report of all runs in some folders, in one file; which accuracies its table has is as in `tables.columns`."""
    runs = tables.find_runs(folders, unfinished=True)
    write_durably(out, page(runs, pick=pick, clients=clients).encode())
