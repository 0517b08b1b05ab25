"""The top of a report: its title, notices and main figures."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from fedslr.report.answer_tables import model_trend
from fedslr.report.certainty import separable_best, trend_in_words
from fedslr.report.number_text import format_bytes, format_count, percent, plural
from fedslr.report.report_view import SPARSE_METHODS, View
from fedslr.report.run_facts import averaged_over
from fedslr.report.saved_runs import Run


class Card(NamedTuple):
    """One main figure on top of a page."""

    value: str
    label: str
    note: str


def title(view: View) -> str:
    """Return the methods and data of a page."""
    methods = list(dict.fromkeys(str(r.summary["algorithm"]) for g in view.groups for r in g.runs))
    data = ", ".join(dict.fromkeys(str(r.summary["dataset"]) for r in view.runs))
    keys = list(view.groups[0].labels)
    named = " and ".join(methods) if len(methods) == 1 or (keys == ["method"] and len(methods) == 2) else ""
    varied = [k for k in keys if k != "method"] if view.several else []
    return f"{named or f'{len(methods)} methods'} on {data}" + (f", by {' and '.join(varied)}" if varied else "")


def subtitle(view: View) -> str:
    numbers = {r.summary.get("clients") for r in view.runs}
    number = numbers.pop() if len(numbers) == 1 else None
    seeds = sorted({r.config.get("seed", 0) for r in view.runs}, key=str)
    parts = [plural(number, "client")] if isinstance(number, int) and number else []
    parts.append(plural(max(r.summary["rounds"] for r in view.runs), "round"))
    parts.append(f"{plural(len(seeds), 'seed')} ({', '.join(map(str, seeds))})")
    return ", ".join(parts + ([f"{len(view.runs)} runs"] if len(view.runs) > 1 else []))


UNUSUAL_CHOICES = {
    "best": "of the best evaluation of every run, not of its last (--pick best)",
    "late": "means of the last five evaluations of every run, not those of its last (--pick late)",
    "sampled": "of the clients sampled in the evaluated round, not of all (--clients sampled)",
}
"""Descriptions of the choices of evaluation and clients that are not the default."""


def notices(view: View) -> list[str]:
    """Return the warnings that a reader needs before trusting a page."""
    chosen, found = [UNUSUAL_CHOICES[c] for c in (view.pick, view.clients) if c in UNUSUAL_CHOICES], []
    if chosen:
        found.append(
            f"Values in the figures on top and in the table are {' and '.join(chosen)}. Charts show all clients; "
            "charts by client show the last evaluation."
        )
    found += [_unfinished(view, run) for run in view.runs if not run.finished]
    if not any(r.get(run.metric.key("personal")) is not None for run in view.runs for r in run.records):
        found.append(f"Nothing has been evaluated yet, so there is no {view.metric.words}.")
    return found + _trends(view)


def _unfinished(view: View, run: Run) -> str:
    name = f"{run.folder.name}: " if len(view.runs) > 1 else ""
    text = f"{name}not finished: {run.summary['rounds']} of {run.config.get('rounds', '?')} rounds are there. Unless "
    text += "it is still running, resume it with the command that started it and --resume."
    if not any(run is r for g in view.groups for r in g.runs):
        text += " It counts neither in the curves nor in the table: other seeds are finished."
    return text


def _trends(view: View) -> list[str]:
    """Return a warning if the accuracy of some models still changes at the end."""
    moving = []
    for one in view.models():
        trend = model_trend(one)
        words = trend_in_words(trend, one.group.runs[0].summary["rounds"]) if trend else ""
        moving += [f"{one.name} ({words})"] if words.startswith("still") else []
    return [f"Not converged yet: {'; '.join(moving)}. More rounds may change the results."] if moving else []


def cards(view: View) -> list[Card]:
    return _best_figures(view) if view.several else _main_figures(view)


def _main_figures(view: View) -> list[Card]:
    """Return the figures of one method; means over its seeds."""
    runs = view.groups[0].runs

    def mean(table: str, key: str) -> float | None:
        values = [run.summary[table][key] for run in runs]
        return None if None in values else fmean(values)

    over = f"{averaged_over(runs[0].records, view.metric)}, {plural(len(runs), 'seed')}"
    found = []
    name = view.metric.words
    for model, label in (("personal", f"{name} of the personal models"), ("global", f"{name} of the global model")):
        score = view.columns[view.metric.key(model)].figures(runs)[0]
        found += [] if score is None else [Card(view.metric.text(score), label, over)]
    dense, size, personal = (mean("parameters", key) for key in ("dense", "global", "personal"))
    if dense and size:
        note = f"{format_count(size)} of {format_count(dense)} parameters"
        found.append(Card(percent(size / dense), "size of the global model", note))
        if personal and runs[0].summary["algorithm"] in SPARSE_METHODS:
            note = f"{format_count(personal - size)} parameters are left"
            found.append(Card(percent(1 - (personal - size) / dense), "zeros in the personal parts", note))
    down, up = mean("bytes", "down") or 0, mean("bytes", "up") or 0
    if down or up:
        found.append(Card(format_bytes(down + up), "sent in all", f"{format_bytes(down)} down, {format_bytes(up)} up"))
    return found


def _best_figures(view: View) -> list[Card]:
    """Return the best method by each of some figures, and whether seeds separate it from the others."""
    metric = view.metric
    best = f"{'highest' if metric.larger_is_better else 'lowest'} {metric.words}"
    labels = {
        metric.key("personal"): f"{best} of personal models",
        metric.key("global"): f"{best} of a global model",
        "worst_decile_personal": f"{best} for the tenth served worst",
        "parameters_personal": "smallest personal models",
    }
    found = []
    for key, label in labels.items():
        column, size = view.columns[key], key.startswith("parameters")
        known = [(v, g) for g in view.groups if (v := column.figures(g.runs)[0])]
        if known:
            value, group = max(known, key=lambda pair: (-1 if size else column.sign) * pair[0])
            certain = size or separable_best(view.groups, column.goodness) is group
            doubt = "" if certain else ", from one seed" if len(group.runs) == 1 else ", not separable from all others"
            found.append(Card(column.show(value) + ("" if size else metric.unit), label, group.name + doubt))
    return found
