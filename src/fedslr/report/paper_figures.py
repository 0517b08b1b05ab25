"""Figures for papers, drawn with matplotlib in the colours of the reports."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedslr.core.errors import FedslrError
from fedslr.report import curves
from fedslr.report.colours import PALETTE, Look, looks
from fedslr.report.hyperparameter_sweeps import final_accuracies, find_sweep, spans_decades
from fedslr.report.label_chart import LABEL_COLOURS
from fedslr.report.run_groups import Group
from fedslr.report.saved_runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("", "s", "D", "^", "v")
ALARM_COLOUR = "#B3261E"
MAX_TICKED_VALUES = 8
"""A hyperparameter with more values does not have a tick for each."""
MAX_LEVEL_LETTERS = 12
"""Longer names under a violin are turned."""
TURNED: dict[str, Any] = {"rotation": 40, "ha": "right"}
MAX_LEGEND_ON_AXES = 5
"""A legend with more entries lies beside the axes."""
MAX_NAME_LETTERS = 50


class Options(NamedTuple):
    """Settings of the figures."""

    client: int | str | None = None
    """The client of the t-SNE figure; by default the one with the most labels."""
    megabits: float = 10.0
    """Bandwidth of a client's connection in Mbit/s, the same in both directions."""
    milliseconds: float = 20.0
    """Delay of a message."""
    represent: Callable[[Run, int | str | None], Any] = lambda run, client: None
    """Opens a run and returns one client's samples as its models see them."""
    report: Callable[[str], None] = lambda text: None
    """Receives a line on every run that a figure leaves out."""


def _canvas(width: float, height: float, *shape: int, **more: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure  # imported late: it takes a second

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(*shape, **more)


def _dress(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes, figure: Figure) -> None:
    """Put a small legend on the axes; else beside them, and enlarge the figure so that the axes keep their width."""
    handles, names = axes.get_legend_handles_labels()
    shown = [_short(name) for name in names]
    if len(handles) <= MAX_LEGEND_ON_AXES:
        axes.legend(handles, shown, loc="best", framealpha=0.85, edgecolor="none")
        return
    figure.set_figwidth(figure.get_figwidth() + 0.6 + 0.075 * max(map(len, shown)))
    figure.set_figheight(max(figure.get_figheight(), 0.6 + 0.19 * len(shown)))
    axes.legend(handles, shown, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def _by_round(axes: Axes, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    _dress(axes, "communication round", label)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _from_zero(axes: Axes) -> None:
    """Let the upward axis begin at 0 and end above the highest line."""
    axes.set_ylim(0, 1.08 * max(float(y) for line in axes.lines for y in np.asarray(line.get_ydata())))


def _short(name: str) -> str:
    """Return a name that leaves room for the axes; its end, which names the model, stays."""
    return name if len(name) <= MAX_NAME_LETTERS else f"{name[:34]}…{name[-15:]}"


def _style(look: Look, points: int, dashed: bool = False) -> dict[str, Any]:
    marker = MARKERS[look.again % len(MARKERS)] or ("o" if points == 1 else "")
    every = max(1, points // 8)
    line = "--" if dashed else "-"
    style = {"color": PALETTE[look.colour], "linestyle": line, "marker": marker, "markevery": every, "markersize": 4}
    return style | ({"markerfacecolor": "white"} if dashed else {})


def _groups(runs: Sequence[Run]) -> list[tuple[Group, Look]]:
    groups = curves.ranked_groups(runs)
    return list(zip(groups, looks([g.name for g in groups]), strict=True))


def accuracy(runs: Sequence[Run], options: Options | None = None) -> Figure:
    """Draw accuracy over rounds: personal models as full lines, global models dashed, one colour per method."""
    figure, axes = _canvas(7.2, 4.2)
    for group, look in _groups(runs):
        models = curves.models(group)
        for model in models:
            points = [(s.round, 100 * s.mean) for s in curves.evaluations(group, f"accuracy_{model}")]
            label = f"{group.name}, {model}" if len(models) > 1 else group.name
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **_style(look, len(points), model == "global"))
    if not axes.lines:
        raise FedslrError("accuracy: nothing has been evaluated yet")
    _by_round(axes, "accuracy, mean over clients (%)")
    _legend(axes, figure)
    return figure


def violin(runs: Sequence[Run], options: Options) -> Figure:
    """Draw the accuracy of every client less its accuracy under FedAvg."""
    base, rows = curves.baselines(runs), []
    for group, look in _groups(runs):
        models = () if curves.is_baseline(group) else curves.models(group)
        alone = [r for r in group.runs if models and not curves.has_baseline(r, base)]
        if alone and base:
            seeds = ", ".join(str(r.summary["seed"]) for r in alone)
            options.report(f"violin: {group.name}, seed {seeds}: no run of fedavg has the same data, settings and seed")
        for model in models:
            values = [100 * v for r in group.runs for v in curves.relative(r, base, model).values()]
            name = f"{group.name}\n({model})" if len(models) > 1 else group.name
            if values:
                rows.append((name, look, values, model == "global"))
    if not rows:
        raise FedslrError(
            "violin: it is relative to FedAvg; give a run of fedavg with the same data and seed, and another"
        )
    figure, axes = _canvas(max(4.5, 0.75 * len(rows) + 1.5), 4.2)
    made = axes.violinplot([values for _, _, values, _ in rows], showextrema=False, widths=0.8)
    for body, (_, look, _, hollow) in zip(made["bodies"], rows, strict=True):
        body.set(facecolor=PALETTE[look.colour], edgecolor=PALETTE[look.colour], alpha=0.2 if hollow else 0.55)
    for at, (_, _, values, _) in enumerate(rows, start=1):
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        axes.vlines(at, low, high, color="#333333", linewidth=3)
        axes.plot(at, middle, "o", color="white", markeredgecolor="#333333", markersize=5)
    axes.axhline(0, color=ALARM_COLOUR, linewidth=1.2)
    longest = max(len(line) for name, *_ in rows for line in name.split("\n"))
    turned = len(rows) > 6 or longest > MAX_LEVEL_LETTERS
    axes.set_xticks(range(1, len(rows) + 1), [name for name, *_ in rows], **(TURNED if turned else {}))
    _dress(axes, "", "accuracy less FedAvg's\n(percentage points)")
    axes.grid(False, axis="x")
    return figure


def communication(runs: Sequence[Run], options: Options) -> Figure:
    """Draw the seconds that one client's messages take per round, over a connection of given bandwidth and delay."""
    figure, axes = _canvas(6.5, 3.8)
    for group, look in _groups(runs):
        each = [curves.communication(run, options.megabits, options.milliseconds) for run in group.runs]
        points = curves.binned(curves.mean_of(each))
        if any(y for _, y in points):
            axes.plot(*zip(*points, strict=True), label=group.name, **_style(look, len(points)))
    if not axes.lines:
        raise FedslrError("communication: no run has sent anything yet")
    line = f"{options.megabits:g} Mbit/s, {options.milliseconds:g} ms"
    _by_round(axes, f"seconds per round and client\n({line})")
    _from_zero(axes)
    _legend(axes, figure)
    return figure


def sensitivity(runs: Sequence[Run], options: Options) -> Figure:
    """Draw the final accuracy and the model sizes over the values of a hyperparameter."""
    found = find_sweep([group for group, _ in _groups(runs)])
    if found is None:
        raise FedslrError("sensitivity: it needs runs that differ in a number, as fedslr sweep makes them")
    figure, (left, right) = _canvas(9, 3.8, 1, 2)
    for name, look in zip(found.lines, looks(list(found.lines)), strict=True):
        for model in ("personal", "global"):
            _sensitivity_line(left, right, found.lines[name], name, model, look)
    values = [x for line in found.lines.values() for x, _ in line]
    positive = [value for value in values if value > 0]
    for axes, label in ((left, "accuracy, mean over clients (%)"), (right, "numbers in a model's parts (thousands)")):
        _dress(axes, found.key, label)
        if spans_decades(values):
            axes.set_xscale("log")
        elif min(values) == 0 and positive and spans_decades(positive):
            # Logarithmic, with 0 one step before the smallest value.
            axes.set_xscale("symlog", linthresh=min(positive), linscale=0.4)
        _tick(axes, sorted(set(values)))
    if right.lines:
        _from_zero(right)
    handles, names = left.get_legend_handles_labels()
    shown = [_short(name) for name in names]
    if shown:
        columns = max(1, min(len(shown), 100 // (6 + max(map(len, shown)))))
        figure.legend(handles, shown, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def _tick(axes: Axes, values: Sequence[float]) -> None:
    """Put a tick at every value, unless there are many."""
    if len(values) <= MAX_TICKED_VALUES:
        axes.set_xticks(values, [f"{value:g}" for value in values], **(TURNED if len(values) > 4 else {}))
        axes.set_xticks([], minor=True)


def _sensitivity_line(
    left: Axes, right: Axes, line: Sequence[tuple[float, Group]], name: str, model: str, look: Look
) -> None:
    known = [(x, [100 * v for v in values]) for x, values in final_accuracies(line, model)]
    style = _style(look, len(known), dashed=model == "global") | {"marker": "o", "markevery": 1}
    if known:
        middle = [fmean(v) for _, v in known]
        spread = [[m - min(v) for m, (_, v) in zip(middle, known, strict=True)]]
        spread.append([max(v) - m for m, (_, v) in zip(middle, known, strict=True)])
        label = f"{name}, {model}" if name else model
        left.errorbar([x for x, _ in known], middle, yerr=spread, capsize=2, label=label, **style)
    sizes = [(x, [r.summary["parameters"][model] for r in g.runs]) for x, g in line]
    sized = [(x, fmean(v) / 1e3) for x, v in sizes if all(v)]
    if sized:
        right.plot(*zip(*sized, strict=True), **style)


def tsne(runs: Sequence[Run], options: Options) -> Figure:
    """Draw a client's samples as the global and the personal extractor see them, with the labels of both classifiers.

    The inputs of the last layer in two dimensions by t-SNE (van der Maaten & Hinton, 2008), as in the paper.
    """
    group, run = _with_two_models(runs)
    seen = options.represent(run, options.client)
    figure, panels = _canvas(7.2, 6.6, 2, 2)
    marks = sorted(set(seen.labels.tolist()))
    for row, extractor in enumerate(("global", "personal")):
        places = embed(seen.features[extractor])
        for column, classifier in enumerate(("global", "personal")):
            _scatter(panels[row][column], places, seen, extractor, classifier, marks)
    handles, names = panels[0][0].get_legend_handles_labels()
    shown = dict(zip(names, handles, strict=True))
    figure.legend(shown.values(), shown, title="label", loc="outside right center", frameon=False)
    name = group.name if "method" in group.labels else f"{seen.name}, {group.name}"
    title = f"{name}, seed {run.summary['seed']}, client {seen.client}: its test samples"
    figure.suptitle(textwrap.fill(title, 75), fontsize="medium")
    return figure


def embed(features: np.ndarray) -> np.ndarray:
    """Return features in two dimensions, always the same for the same features."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, max(2.0, (len(features) - 1) / 3))
    made: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return made


def _scatter(axes: Axes, places: np.ndarray, seen: Any, extractor: str, classifier: str, marks: Sequence[int]) -> None:
    said = seen.predictions[extractor, classifier]
    for label in marks:
        chosen = seen.labels == label
        colour = LABEL_COLOURS[label % len(LABEL_COLOURS)]
        axes.scatter(places[chosen, 0], places[chosen, 1], s=22, color=colour, label=str(label), linewidths=0)
    wrong = said != seen.labels
    axes.scatter(
        places[wrong, 0],
        places[wrong, 1],
        s=80,
        facecolors="none",
        edgecolors=ALARM_COLOUR,
        linewidths=1.3,
        label="misclassified",
    )
    right = 100 * (1 - wrong.mean())
    axes.set_title(f"{extractor} extractor, {classifier} classifier: {right:.0f} %", fontsize="small")
    axes.set(xticks=[], yticks=[])


def _with_two_models(runs: Sequence[Run]) -> tuple[Group, Run]:
    """Return the run to draw among those with a global and personal models: FedSLR's, as in the paper, if it is there.

    Runs that keep their models come first.
    """

    def last(pair: tuple[Group, Run]) -> tuple[bool, bool]:
        kept = any((pair[1].folder / "checkpoint").glob("manifest-*.json"))
        return not kept, pair[1].summary["algorithm"] != "fedslr"

    both = [(g, r) for g in curves.ranked_groups(runs) if len(curves.models(g)) > 1 for r in g.runs]
    if not both:
        raise FedslrError("tsne: no run here has both a global model and personal ones that differ from it")
    return min(both, key=last)


FIGURES: dict[str, Callable[[Sequence[Run], Options], Figure]] = {
    "accuracy": accuracy,
    "violin": violin,
    "tsne": tsne,
    "communication": communication,
    "sensitivity": sensitivity,
}


def check(options: Options) -> None:
    if not (0 < options.megabits < math.inf and 0 <= options.milliseconds < math.inf):
        got = f"got {options.megabits:g} and {options.milliseconds:g}"
        raise FedslrError(f"--bandwidth, --latency: {got}, expected a number above 0 and one of 0 or more")
