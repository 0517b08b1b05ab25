"""The tables of a report that answer questions: which method, for which clients, converged or not, at what cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fedslr.report import curves
from fedslr.report.certainty import MIN_CHANGE, Estimate, final_trend, paired_difference, trend_in_words
from fedslr.report.label_skew import saved_label_counts
from fedslr.report.number_text import format_bytes, format_count, signed
from fedslr.report.report_view import Figure, ModelView, View
from fedslr.report.run_groups import SEED_KEYS, Group
from fedslr.report.saved_runs import Run
from fedslr.report.svg_axes import Cell, html_table, sortable_cell, sortable_head, tag

MAX_CLIENT_ROWS = 300
LONG_RUN = 200
"""Slopes of runs with more rounds are per 100 rounds instead of per 10."""
NONE = "–"
ONE_SEED = "one seed proves nothing"
Row = tuple[int, list[Cell]]
"""The cells of the group at some place."""
Client = tuple[str, int]
"""A split and a client's number in it, because seeds may split data differently."""


def _answer(title: str, caption: str, titles: Sequence[str], rows: Sequence[Row]) -> list[Figure]:
    """Return a table that can be sorted; nothing without rows."""
    body = [tag("tr", *map(sortable_cell, cells), class_=f"g{place}") for place, cells in rows]
    return [Figure(title, caption, html_table(list(map(sortable_head, titles)), body))] if body else []


def _interval(found: Estimate) -> Cell:
    return NONE if math.isinf(found.half) else (f"{signed(found.low)} to {signed(found.high)}", found.low)


def certainty(view: View) -> tuple[Sequence[str], list[Row], str]:
    """Return titles, rows and caption of every method's difference to the best one; no rows for a single method."""
    column, factor = view.columns[view.metric.key("personal")], view.metric.factor
    known = [(i, g, mean) for i, g, _ in view.numbered() if (mean := column.figures(g.runs)[0]) is not None]
    if len(known) < 2:
        return (), [], ""
    best, rows = max(known, key=lambda one: column.sign * one[2])[1], []
    for place, group, mean in known:
        found = paired_difference(group, best, column.value)
        shown: list[Cell] = [
            NONE,
            NONE,
            f"{'highest' if column.sign > 0 else 'lowest'} mean" if group is best else "no seed in common",
        ]
        if found and group is not best:
            doubt = ONE_SEED if math.isinf(found.half) else "not separable"
            worse = found.high < 0 if column.sign > 0 else found.low > 0
            shown = [signed(factor * found.value), _interval(found.times(factor)), "worse" if worse else doubt]
        rows.append((place, [group.name, column.show(mean), str(len(group.runs)), *shown]))
    titles = ("method", column.title, "seeds", f"difference to {best.name}", "95 % interval", "verdict")
    caption = (
        f"Differences are {'in percentage points and ' if view.metric.is_share else ''}paired by seed: each run less "
        "the best method's run with the same seed. The interval is Student's t over seeds. A method is worse if its "
        "whole interval is on the worse side of zero, else it is not separable from the best. With many methods, "
        "some intervals exclude zero by chance."
    )
    if all(len(group.runs) == 1 for _, group, _ in known):
        caption = f"Every method ran with one seed, and {ONE_SEED}: another split or start may reverse the order. "
        caption += "Run every method with several seeds, for example --seeds 0,1,2."
    return titles, rows, caption


def certainty_table(view: View) -> list[Figure]:
    """Return every method's difference to the best one, paired over seeds; nothing for a single method."""
    titles, rows, caption = certainty(view)
    return _answer("Which method is best, and how certain is it?", caption, titles, rows)


class ClientColumn(NamedTuple):
    """A method's headline metric for every client, shares in per cent, or what it has more than another method."""

    place: int
    method: str
    base: str
    """The other method, or nothing."""
    values: dict[Client, float]


def _client_columns(view: View, place: int, group: Group) -> list[ClientColumn]:
    found = []
    for base, model in (("", ""), ("fedavg", "global"), ("local", "personal")):
        against = curves.baselines(view.runs, base)
        if base and (not against or curves.is_baseline(group, base)):
            continue
        values = {}
        for run in group.runs:
            own = curves.by_client(run, run.metric.key("personal", per_client=True))
            each = curves.relative(run, against, "personal", model) if base else own
            values.update({(_split(run), client): run.metric.factor * value for client, value in each.items()})
        found.append(ClientColumn(place, group.name, base, values))
    return found


def _split(run: Run) -> str:
    """Return the settings that decide which data a client has, the seeds first."""
    return repr([*map(run.config.get, SEED_KEYS), *sorted(i for i in run.config.items() if i[0].startswith("data."))])


def _client_row(run: Run, held: np.ndarray | None, client: Client, columns: Sequence[ClientColumn]) -> Markup:
    digits, bad = (1, "−") if run.metric.is_share else (3, "−" if run.metric.larger_is_better else "+")
    counts = np.array([]) if held is None else held[client[1] : client[1] + 1]
    sizes = [str(np.sum(counts)), str(np.count_nonzero(counts))] if len(counts) else [NONE, NONE]
    cells = [sortable_cell(text) for text in (str(client[1]), str(run.config.get("seed", NONE)), *sizes)]
    for column in columns:
        value = column.values.get(client)
        text = NONE if value is None else signed(value, digits) if column.base else f"{value:.{digits}f}"
        worse = column.base and text.startswith(bad)
        cells.append(sortable_cell(text, f"g{column.place}{' worse' if worse else ''}"))
    return tag("tr", *cells)


def _worse_in_words(columns: Sequence[ClientColumn], base: str, sign: int) -> str:
    each = [(column.method, list(column.values.values())) for column in columns if column.base == base]
    told = [f"{method} {sum(sign * v < 0 for v in values)} of {len(values)}" for method, values in each if values]
    return f"Clients that are worse off than with {base}: {', '.join(told)}. " if told else ""


def client_table(view: View) -> list[Figure]:
    """Return the headline metric of every client with every method, also less FedAvg's and local training's."""
    metric, sign = view.metric, 1 if view.metric.larger_is_better else -1
    columns = [column for place, group, _ in view.numbered() for column in _client_columns(view, place, group)]
    clients = sorted({client for column in columns for client in column.values})
    shown = sorted(clients, key=lambda client: sign * columns[0].values.get(client, math.inf))[:MAX_CLIENT_ROWS]
    runs = {_split(run): run for group in view.groups for run in group.runs}
    labels = {split: saved_label_counts(run) for split, run in runs.items()}
    body = [_client_row(runs[c[0]], labels[c[0]], c, columns) for c in sorted(shown)]
    head = [sortable_head(title) for title in ("client", "seed", "training samples", "labels held")]
    head += [
        sortable_head(f"{c.method} − {c.base}" if c.base else f"{c.method}{metric.unit}", c.place) for c in columns
    ]
    caption = f"{metric.words[0].upper()}{metric.words[1:]} of personal models in the last evaluation"
    caption += " (%), and differences in percentage points. " if metric.is_share else ", and differences. "
    caption += _worse_in_words(columns, "fedavg", sign) + _worse_in_words(columns, "local", sign)
    if len(shown) < len(clients):
        worst = f"{'lowest' if sign > 0 else 'highest'} {metric.words}"
        caption += f"The {len(shown)} of {len(clients):,} clients with the {worst} of {columns[0].method}."
    return [Figure("For which clients is it worse?", caption, html_table(head, body))] if body else []


def model_trend(one: ModelView) -> Estimate | None:
    """Return the slope of a model's mean headline metric at the end, per round.

    Shares are in percentage points, other metrics in per cent of the last value.
    """
    samples = curves.evaluations(one.group, one.metric.key(one.model))
    seeds = range(len(one.group.runs)) if samples else ()
    scale = 100.0 if one.metric.is_share or not samples else 100 / (abs(samples[-1].mean) or 1.0)
    return final_trend([[(s.round, scale * s.values[n]) for s in samples] for n in seeds])


def convergence_table(view: View) -> list[Figure]:
    """Return the slope of the headline metric of every model at the end of its rounds, and a verdict."""
    rows: list[Row] = []
    for one in view.models():
        if trend := model_trend(one):
            rounds = one.group.runs[0].summary["rounds"]
            per = 10 if rounds < LONG_RUN else 100
            shown = (f"{signed(per * trend.value)} per {per} rounds", per * trend.value)
            rows.append((one.place, [one.name, shown, _interval(trend.times(per)), trend_in_words(trend, rounds)]))
    points = "percentage points" if view.metric.is_share else "per cent of the last value"
    caption = (
        f"The slope of the {view.metric.words} over the last tenth of the rounds, or over the last three evaluations "
        f"if it has fewer: least squares over all seeds, in {points}, with a 95 % interval. Level: a change below "
        f"{MIN_CHANGE} points over a tenth of the rounds. No clear trend: the interval contains zero."
    )
    return _answer("Has it converged?", caption, ("model", "slope", "95 % interval", "verdict"), rows)


COSTS: dict[str, tuple[Callable[[Run], float | None], Callable[[float], str]]] = {
    "bytes down": (lambda run: run.summary["bytes"]["down"], format_bytes),
    "bytes up": (lambda run: run.summary["bytes"]["up"], format_bytes),
    "seconds": (lambda run: sum(run.summary["seconds"].values()), "{:.3g}".format),
    "parameters, global model": (lambda run: run.summary["parameters"]["global"] or None, format_count),
    "parameters, personal model": (lambda run: run.summary["parameters"]["personal"], format_count),
    # Runs of earlier versions do not have this size.
    "parameters, personal, shipped": (lambda run: run.summary["parameters"].get("shipped"), format_count),
}


def cost_table(view: View) -> list[Figure]:
    """Return the bytes, the seconds and the parameters of every method; means over seeds."""
    rows: list[Row] = []
    for place, group, _ in view.numbered():
        cells: list[Cell] = [group.name]
        for figure, show in COSTS.values():
            known = [value for run in group.runs if (value := figure(run)) is not None]
            cells.append((show(fmean(known)), fmean(known)) if known else NONE)
        rows.append((place, cells))
    caption = (
        "Bytes of all messages of all rounds, as encoded. Parameters as the paper counts them: factors where they are "
        "smaller, non-zeros elsewhere. Shipped: at most the dense model, into which the parts of a personal model can "
        "be merged. Means over seeds."
    )
    return _answer("What does it cost?", caption, ("method", *COSTS), rows)
