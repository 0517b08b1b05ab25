"""The section of a report on the labels that clients hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedslr.report.label_chart import label_chart, label_table
from fedslr.report.label_skew import extremes, saved_label_counts, skew
from fedslr.report.number_text import percent
from fedslr.report.report_view import Figure, Section, View
from fedslr.report.saved_runs import Run
from fedslr.report.svg_axes import Axis

MAX_DRAWN_CLIENTS = 200


def label_section(view: View) -> Section:
    found = [(run, counts) for run in view.drawn_runs() if (counts := saved_label_counts(run)) is not None]
    if not found:
        return Section("Data", [])
    counts = found[0][1]
    shown, figures = counts[:MAX_DRAWN_CLIENTS], skew(counts)
    caption = f"Training samples of every client, one colour for each of {counts.shape[1]} labels. "
    caption += _which_split(view, found)
    if len(counts) > len(shown):
        caption += f"The first {MAX_DRAWN_CLIENTS} clients. "
    caption += f"On average a client holds {figures['labels_held']:.1f} labels, its most frequent one has "
    caption += f"{percent(figures['largest_share'])} of its samples, and it is {percent(figures['distance'])} away "
    caption += f"from all clients' ratio; {extremes(counts)}."
    axis = Axis("client", "{:.0f}".format, whole=True)
    made = label_chart("Labels of every client", shown, axis, Axis("samples", "{:.4g}".format, low=0))
    return Section("Data", [Figure("Labels of every client", caption, made, label_table(shown))])


def _which_split(view: View, found: list[tuple[Run, np.ndarray]]) -> str:
    """Return which of several splits the first one is: a seed's, or also a group's if its seed has several."""
    run, counts = found[0]
    others = [other for other, theirs in found if not np.array_equal(theirs, counts)]
    if not others:
        return ""
    group = next(g for g in view.groups if any(r is run for r in g.runs))
    named = [group.name] if any(_split_seed(run) == _split_seed(other) for other in others) else []
    named += [f"seed {_split_seed(run)}"] if len({_split_seed(r) for r, _ in found}) > 1 else []
    return f"This is the split of {', '.join(named)}; others differ. "


def _split_seed(run: Run) -> Any:
    return run.config.get("data.seed", run.config.get("seed"))
