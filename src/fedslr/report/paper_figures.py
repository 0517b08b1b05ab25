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
from fedslr.report.label_section import LABEL_COLOURS
from fedslr.report.line_chart import set_apart
from fedslr.report.number_text import format_count
from fedslr.report.run_groups import Group
from fedslr.report.saved_runs import Run
from fedslr.storage.statistics import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("", "s", "D", "^", "v")
ALARM_COLOUR = "#B3261E"
DENSE_COLOUR = "#8A8A8A"
MAX_TICKED_VALUES = 8
"""A hyperparameter with more values does not have a tick for each."""
MAX_LEVEL_LETTERS = 12
"""Longer names under a violin are turned."""
TURNED: dict[str, Any] = {"rotation": 40, "ha": "right"}
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


def _canvas(width: float, height: float, *shape: int) -> tuple[Figure, Any]:
    from fedslr.report.shown_figure import ShownFigure  # imported late: matplotlib takes a second

    figure = ShownFigure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(*shape)


def _dress(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _name_ends(figure: Figure, axes: Axes) -> None:
    """Write the name of every line at the right of the axes, without overlap, and enlarge the figure by them."""
    ends = [np.asarray(line.get_xydata())[-1] for line in axes.lines]
    names = [_short(str(line.get_label())) for line in axes.lines]
    figure.set_figwidth(figure.get_figwidth() + 0.075 * max(map(len, names)))
    figure.set_figheight(max(figure.get_figheight(), 0.9 + 0.19 * len(names)))
    low, high = axes.get_ylim()
    gap = 0.19 * (high - low) / (figure.get_figheight() - 0.9)
    places = set_apart([y for _, y in ends], gap, low, high)
    for line, name, end, place in zip(axes.lines, names, ends, places, strict=True):
        leader: dict[str, Any] = {
            "arrowstyle": "-",
            "linewidth": 0.7,
            "linestyle": ":",
            "color": line.get_color(),
            "relpos": (0, 0.5),
        }
        style: dict[str, Any] = {
            "va": "center",
            "fontsize": "small",
            "color": line.get_color(),
            "annotation_clip": False,
        }
        axes.annotate(name, end, (1.04, place), textcoords=("axes fraction", "data"), arrowprops=leader, **style)


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
    """Return how to draw a line. Dashed lines lie on top of full ones, which remain visible below."""
    marker = MARKERS[look.again % len(MARKERS)] or ("o" if points == 1 else "")
    style = {"color": PALETTE[look.colour], "marker": marker, "markevery": max(1, points // 8), "markersize": 4}
    return style | ({"linestyle": "--", "zorder": 3, "markerfacecolor": "white"} if dashed else {})


def _groups(runs: Sequence[Run]) -> list[tuple[Group, Look]]:
    return _looks(curves.ranked_groups(runs))


def _looks(groups: Sequence[Group]) -> list[tuple[Group, Look]]:
    return list(zip(groups, looks([g.name for g in groups]), strict=True))


def _axis_label(metric: Headline) -> str:
    return f"{metric.words}, mean over clients" + (" (%)" if metric.is_share else "")


def accuracy(runs: Sequence[Run], options: Options | None = None) -> Figure:
    """Draw the headline metric over rounds: personal models as full lines, global ones dashed, bands over seeds."""
    return accuracy_of(curves.ranked_groups(runs))


def accuracy_of(groups: Sequence[Group]) -> Figure:
    """Draw the headline metric of groups of runs over rounds."""
    figure, axes = _canvas(5.8, 4.2)
    _accuracy_lines(axes, groups)
    _name_ends(figure, axes)
    return figure


def _accuracy_lines(axes: Axes, groups: Sequence[Group]) -> None:
    for group, look in _looks(groups):
        models = curves.models(group)
        for model in models:
            metric = group.runs[0].metric
            found = curves.evaluations(group, metric.key(model))
            if not found:
                continue
            rounds, label = [s.round for s in found], f"{group.name}, {model}" if len(models) > 1 else group.name
            style = _style(look, len(found), model == "global")
            axes.plot(rounds, [metric.factor * s.mean for s in found], label=label, **style)
            low, high = ([metric.factor * end(s.values) for s in found] for end in (min, max))
            axes.fill_between(rounds, low, high, color=style["color"], alpha=0.12, linewidth=0)
    if not axes.lines:
        raise FedslrError("accuracy: nothing has been evaluated yet")
    lowest = curves.late_minimum([np.asarray(line.get_xydata()).tolist() for line in axes.lines])
    if lowest is not None and groups[0].runs[0].metric.is_share:
        axes.set_ylim(lowest - 0.5, min(axes.get_ylim()[1], 100.5))
    _by_round(axes, _axis_label(groups[0].runs[0].metric))


def one_run(run: Run) -> Figure:
    """Draw the headline metric and the sizes of one run over rounds: personal models full, the global model dashed."""
    figure, (left, right) = _canvas(9, 3.8, 1, 2)
    ((group, look),) = _groups([run])
    _accuracy_lines(left, [group])
    sized = [r for r in run.records if r.get("parameters_personal")]
    rounds = [r["round"] for r in sized]
    own, shared = [fmean(r["parameters_personal"]) for r in sized], [r["parameters_global"] for r in sized]
    right.plot(rounds, own, label="personal", **_style(look, len(sized)))
    if any(shared) and shared != own:
        right.plot(rounds, shared, label="global", **_style(look, len(sized), dashed=True))
    right.axhline(run.summary["parameters"]["dense"], color=DENSE_COLOUR, linewidth=1, label="dense")
    _by_round(right, "parameters of a model")
    right.yaxis.set_major_formatter(lambda value, place: format_count(value))
    _from_zero(right)
    for axes in (left, right):
        if len(axes.lines) > 1:
            axes.legend(frameon=False, fontsize="small")
    return figure


def violin(runs: Sequence[Run], options: Options) -> Figure:
    """Draw the headline metric of every client less that under FedAvg."""
    base, rows = curves.baselines(runs), []
    for group, look in _groups(runs):
        models = () if curves.is_baseline(group) else curves.models(group)
        alone = [r for r in group.runs if models and curves.setting(r) not in base]
        if alone and base:
            seeds = ", ".join(str(r.summary["seed"]) for r in alone)
            options.report(f"violin: {group.name}, seed {seeds}: no run of fedavg has the same data, settings and seed")
        for model in models:
            values = [r.metric.factor * v for r in group.runs for v in curves.relative(r, base, model).values()]
            if values:
                name = f"{group.name}\n({model})" if len(models) > 1 else group.name
                rows.append((name, look, values, model == "global"))
    if not rows:
        raise FedslrError(
            "violin: it is relative to FedAvg; give a run of fedavg with the same data and seed, and another"
        )
    figure, axes = _canvas(max(4.5, 0.75 * len(rows) + 1.5), 4.2)
    made = axes.violinplot([values for _, _, values, _ in rows], showextrema=False, widths=0.8)
    for at, (body, (_, look, values, hollow)) in enumerate(zip(made["bodies"], rows, strict=True), start=1):
        body.set(facecolor=PALETTE[look.colour], edgecolor=PALETTE[look.colour], alpha=0.2 if hollow else 0.55)
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        axes.vlines(at, low, high, color="#333333", linewidth=3)
        axes.plot(at, middle, "o", color="white", markeredgecolor="#333333", markersize=5)
    axes.axhline(0, color=ALARM_COLOUR, linewidth=1.2)
    turned = len(rows) > 6 or max(len(line) for name, *_ in rows for line in name.split("\n")) > MAX_LEVEL_LETTERS
    axes.set_xticks(range(1, len(rows) + 1), [name for name, *_ in rows], **(TURNED if turned else {}))
    metric = runs[0].metric
    _dress(axes, "", f"{metric.words} less FedAvg's" + ("\n(percentage points)" if metric.is_share else ""))
    axes.grid(False, axis="x")
    return figure


def communication(runs: Sequence[Run], options: Options) -> Figure:
    """Draw the seconds that one client's messages take per round, over a connection of given bandwidth and delay."""
    figure, axes = _canvas(5.6, 3.8)
    for group, look in _groups(runs):
        each = [curves.communication(run, options.megabits, options.milliseconds) for run in group.runs]
        points = curves.binned(curves.mean_of(each))
        if any(y for _, y in points):
            axes.plot(*zip(*points, strict=True), label=group.name, **_style(look, len(points)))
    if not axes.lines:
        raise FedslrError("communication: no run has sent anything yet")
    _by_round(axes, f"seconds per round and client\n({options.megabits:g} Mbit/s, {options.milliseconds:g} ms)")
    _from_zero(axes)
    _name_ends(figure, axes)
    return figure


def sensitivity(runs: Sequence[Run], options: Options) -> Figure:
    """Draw the final accuracy and the model sizes over the values of a hyperparameter."""
    found = curves.find_sweep([group for group, _ in _groups(runs)])
    if found is None:
        raise FedslrError(
            "sensitivity: the figure needs runs with several values of one number; make them with `fedslr sweep`"
        )
    figure, (left, right) = _canvas(9, 3.8, 1, 2)
    for name, look in zip(found.lines, looks(list(found.lines)), strict=True):
        for model in ("personal", "global"):
            _sensitivity_line(left, right, found.lines[name], name, model, look)
    values = sorted({x for line in found.lines.values() for x, _ in line})
    positive = [value for value in values if value > 0]
    for axes, label in ((left, _axis_label(runs[0].metric)), (right, "parameters of a model (thousands)")):
        _dress(axes, found.key, label)
        if curves.spans_decades(values):
            axes.set_xscale("log")
        elif values[0] == 0 and curves.spans_decades(positive):
            # Logarithmic, with 0 one step before the smallest value.
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.4)
        if len(values) <= MAX_TICKED_VALUES:
            axes.set_xticks(values, [f"{value:g}" for value in values], **(TURNED if len(values) > 4 else {}))
            axes.set_xticks([], minor=True)
    if right.lines:
        _from_zero(right)
    handles, names = left.get_legend_handles_labels()
    if names:
        shown = list(map(_short, names))
        columns = max(1, min(len(shown), 100 // (6 + max(map(len, shown)))))
        figure.legend(handles, shown, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def _sensitivity_line(
    left: Axes, right: Axes, line: Sequence[tuple[float, Group]], name: str, model: str, look: Look
) -> None:
    known = curves.final_scores(line, model)
    style = _style(look, len(known), dashed=model == "global") | {"marker": "o", "markevery": 1}
    if known:
        x, middle = [x for x, _ in known], [fmean(v) for _, v in known]
        spread = np.abs([[m - min(v), max(v) - m] for m, (_, v) in zip(middle, known, strict=True)]).T
        left.errorbar(x, middle, yerr=spread, capsize=2, label=f"{name}, {model}" if name else model, **style)
    sizes = [(x, [r.summary["parameters"][model] for r in g.runs]) for x, g in line]
    if sized := [(x, fmean(v) / 1e3) for x, v in sizes if all(v)]:
        right.plot(*zip(*sized, strict=True), **style)


def tsne(runs: Sequence[Run], options: Options) -> Figure:
    """Draw a client's samples as the global and the personal extractor see them, with the labels of both classifiers.

    The inputs of the last layer in two dimensions by t-SNE (van der Maaten & Hinton, 2008), as in the paper.
    """
    group, run = _with_two_models(runs)
    seen = options.represent(run, options.client)
    figure, panels = _canvas(7.2, 6.6, 2, 2)
    for row, extractor in enumerate(("global", "personal")):
        places = embed(seen.features[extractor])
        for column, classifier in enumerate(("global", "personal")):
            _scatter(panels[row][column], places, seen, extractor, classifier)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, title="label", loc="outside right center", frameon=False)
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


def _scatter(axes: Axes, places: np.ndarray, seen: Any, extractor: str, classifier: str) -> None:
    for label in sorted(set(seen.labels.tolist())):
        (x, y), colour = places[seen.labels == label].T, LABEL_COLOURS[label % len(LABEL_COLOURS)]
        axes.scatter(x, y, s=22, color=colour, label=str(label), linewidths=0)
    wrong = seen.predictions[extractor, classifier] != seen.labels
    ring: dict[str, Any] = {"facecolors": "none", "edgecolors": ALARM_COLOUR, "linewidths": 1.3}
    x, y = places[wrong].T
    axes.scatter(x, y, s=80, label="misclassified", **ring)
    right = 100 * (1 - wrong.mean())
    axes.set_title(f"{extractor} extractor, {classifier} classifier: {right:.0f} %", fontsize="small")
    axes.set(xticks=[], yticks=[])


def _with_two_models(runs: Sequence[Run]) -> tuple[Group, Run]:
    """Return a run with a global and personal models, preferably one that keeps them, then FedSLR's."""

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
