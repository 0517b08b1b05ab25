"""The top of a report: its title, notices and main figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from fedslr.report.number_text import format_bytes, format_count, percent, plural
from fedslr.report.report_view import SPARSE_METHODS, View
from fedslr.report.result_tables import Column
from fedslr.report.run_facts import averaged_over
from fedslr.report.saved_runs import Run


class Card(NamedTuple):
    """One main figure on top of a page."""

    value: str
    what: str
    note: str


def title(view: View) -> str:
    """Return the methods and data of a page."""
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


UNUSUAL_CHOICES = {
    "best": "of the best evaluation of every run, not of its last (--pick best)",
    "late": "means of the last five evaluations of every run, not those of its last (--pick late)",
    "sampled": "of the clients sampled in the evaluated round, not of all (--clients sampled)",
}
"""How a notice describes the choices of evaluation and clients that are not the default."""


def notices(view: View, pick: str = "last", clients: str = "all") -> list[str]:
    """Return the warnings that a reader needs before trusting a page."""
    asked, told = [UNUSUAL_CHOICES[choice] for choice in (pick, clients) if choice in UNUSUAL_CHOICES], []
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
    return _best_figures(view, figures) if view.several else _main_figures(view.groups[0].runs, figures)


def _main_figures(runs: Sequence[Run], figures: Mapping[str, Column]) -> list[Card]:
    """Return the figures of one method; means over its seeds."""

    def mean(table: str, key: str) -> float | None:
        values = [run.summary[table][key] for run in runs]
        return None if None in values else fmean(values)

    own, shared = (figures[f"accuracy_{model}"].figures(runs)[0] for model in ("personal", "global"))
    dense, size, personal = (mean("parameters", key) for key in ("dense", "global", "personal"))
    down, up = mean("bytes", "down") or 0, mean("bytes", "up") or 0
    over = averaged_over(runs[0].records)
    found = [Card(percent(own), "accuracy of the personal models", over)] if own is not None else []
    if shared is not None:
        found.append(Card(percent(shared), "accuracy of the global model", over))
    if dense and size:
        note = f"{format_count(size)} of {format_count(dense)} numbers"
        found.append(Card(percent(size / dense), "size of the global model", note))
    if dense and size and personal and runs[0].summary["algorithm"] in SPARSE_METHODS:
        note = f"{format_count(personal - size)} numbers are left"
        found.append(Card(percent(1 - (personal - size) / dense), "zeros in the personal parts", note))
    if down or up:
        found.append(Card(format_bytes(down + up), "sent in all", f"{format_bytes(down)} down, {format_bytes(up)} up"))
    return found


def _best_figures(view: View, figures: Mapping[str, Column]) -> list[Card]:
    """Return the best method by each of some figures."""

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
