"""The sections of a report: which charts there are, of what, and in which words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fedslr.report import charts, curves, percent
from fedslr.report.charts import Axis, Point, Series, Violin, spaced
from fedslr.report.colours import Look, looks
from fedslr.report.split import extremes, skew
from fedslr.report.tables import Group, Run

SPARSE = {"fedslr", "lpgd", "gpgd", "sparse-sparse"}
"""Methods whose clients keep a sparse part beside the global model."""
DOTS = 2500
"""Clients that are drawn one by one in a chart, at most."""
STRIPS = 6
"""Heat maps of ranks, at most."""
LAYERS = 60
CLIENTS = 200
"""Clients whose labels are drawn, at most."""
POINTS = 240
"""Points of a line, at most."""
KEYED = 12
"""Lines that a chart names itself, at most."""
SHAPE = "Wide where many clients are. Bar: the middle half of them; large dot: the median; small dots: clients."

ROUND = Axis("communication round", "{:.0f}".format, whole=True)
PERCENT = (0.0, 100.0)
ACCURACY = Axis("accuracy, mean over clients (%)", "{:.4g}".format, bounds=PERCENT)


class Figure(NamedTuple):
    """A chart, what it shows, and its numbers."""

    title: str
    caption: str
    chart: Markup
    values: Markup | None = None


class Section(NamedTuple):
    title: str
    figures: Sequence[Figure]


class Shown(NamedTuple):
    """One model of one group of runs, and how it is drawn."""

    name: str
    place: int
    """Of the group among others."""
    group: Group
    look: Look
    model: str

    @property
    def dashed(self) -> bool:
        return self.model == "global"

    def line(self, points: Sequence[Point], spread: Sequence[Point] = ()) -> Series:
        return Series(self.name, self.place, self.look, points, self.dashed, spread)

    def violin(self, found: Sequence[dict[int, float]]) -> Violin:
        """What the clients of every run have, in per cent."""
        pairs = []
        for run, each in zip(self.group.runs, found, strict=True):
            seed = f", seed {run.config.get('seed')}" if len(self.group.runs) > 1 else ""
            pairs += [(f"client {client}{seed}", 100 * value) for client, value in each.items()]
        values, whose = [v for _, v in pairs], [who for who, _ in pairs]
        return Violin(self.name, self.place, self.look, values, whose, self.dashed)


class View:
    """Groups of runs, each with its look."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.groups = curves.groups(runs)
        self.looks = looks([g.name for g in self.groups])
        self.several = len(self.groups) > 1

    def counted(self) -> list[Run]:
        """The runs that curves and tables are of."""
        return [run for group in self.groups for run in group.runs]

    def each(self) -> list[tuple[int, Group, Look]]:
        return [(i, g, look) for i, (g, look) in enumerate(zip(self.groups, self.looks, strict=True))]

    def named(self, group: Group, part: str) -> str:
        """A series' name: the group's, if there are others, and which part of it this is."""
        return f"{group.name}, {part}" if self.several and part else part or group.name

    def shown(self) -> list[Shown]:
        """Every model of every group."""
        found = []
        for i, group, look in self.each():
            models = curves.models(group)
            for model in models:
                name = self.named(group, "" if self.several and len(models) == 1 else model)
                found.append(Shown(name, i, group, look, model))
        return found

    def one_seed(self) -> str:
        """What a caption says where only the first run of a group is drawn."""
        most = max(len(g.runs) for g in self.groups)
        return "" if most == 1 else " One seed of each." if self.several else f" One of {most} seeds."

    def lines(self, title: str, caption: str, series: Sequence[Series], x: Axis, y: Axis) -> list[Figure]:
        """A chart of lines with its numbers; none where there is nothing to draw."""
        there = [s for s in series if s.points]
        if not there:
            return []
        # The page's legend names groups; where there is none, the chart has a key of its own.
        chart = charts.lines(title, there, x, y, key=not self.several and 1 < len(there) <= KEYED)
        return [Figure(title, caption, chart, charts.values_table(there, x, y))]


def all_of(view: View) -> list[Section]:
    """The sections that have something to show."""
    made = (accuracy, sensitivity, clients, models, costs, labels)
    return [section for section in (make(view) for make in made) if section.figures]


def accuracy(view: View) -> Section:
    """Accuracy over rounds and over bytes."""
    by_round, by_bytes, sent = [], [], 0.0
    for one in view.shown():
        found = spaced(curves.evaluations(one.group, f"accuracy_{one.model}"), POINTS)
        several = len(one.group.runs) > 1
        spread = [(100 * min(s.values), 100 * max(s.values)) for s in found] if several else []
        by_round.append(one.line([(s.round, 100 * s.mean) for s in found], spread))
        if found and found[-1].bytes:
            sent = max(sent, found[-1].bytes)
            by_bytes.append(one.line([(s.bytes, 100 * s.mean) for s in found]))
    styles = "Full lines, full dots: every client with its own model. Dashed lines, hollow dots: all with the global "
    styles += "model." + _bands(by_round)
    both, exact = "Bytes of all messages, down and up.", _bytes_axis("sent by then, both ways", sent)
    return Section(
        "Accuracy",
        view.lines("Accuracy over rounds", styles, by_round, ROUND, ACCURACY)
        + view.lines("Accuracy over bytes sent", both, by_bytes, exact, ACCURACY),
    )


def _bands(series: Sequence[Series]) -> str:
    return " Bands: lowest and highest seed." if charts.has_bands([s for s in series if s.points]) else ""


def _bytes_axis(label: str, largest: float) -> Axis:
    """Bytes in the unit of the largest."""
    power = min(4, max(0, int(math.log10(largest) // 3))) if largest >= 1 else 0
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return Axis(f"{label} ({unit})", lambda v: f"{v / 1000**power:.4g}", low=0)


def clients(view: View) -> Section:
    """How accuracy is spread over clients, as it is and relative to FedAvg."""
    base, plain, against = curves.baselines(view.runs), [], []
    for one in view.shown():
        key = f"accuracy_{one.model}_per_client"
        plain.append(one.violin([curves.by_client(r, key) for r in one.group.runs]))
        if not curves.is_baseline(one.group):
            against.append(one.violin([curves.relative(r, base, one.model) for r in one.group.runs]))
    over = "Right of the red line clients are better off than with FedAvg, left of it worse. " + SHAPE
    alone = [
        group.name
        for group in view.groups
        if not curves.is_baseline(group) and not all(curves.has_baseline(run, base) for run in group.runs)
    ]
    if alone:
        over += f" Left out, for want of a run of FedAvg with the same data, settings and seed: {', '.join(alone)}."
    gain = Axis("accuracy less FedAvg's, percentage points", _signed, low=0, high=0)
    return Section(
        "Over clients",
        _violins("Accuracy of every client", SHAPE, plain, Axis("accuracy (%)", "{:.3g}".format, bounds=PERCENT))
        + _violins("Accuracy relative to FedAvg", over, against, gain, "as good as FedAvg"),
    )


def _signed(value: float) -> str:
    return f"{value:+.3g}" if value else "0"


def _violins(title: str, caption: str, rows: Sequence[Violin], axis: Axis, zero: str | None = None) -> list[Figure]:
    there = [r for r in rows if r.values]
    if not there:
        return []
    dots = sum(len(r.values) for r in there) <= DOTS
    chart = charts.violins(title, there, axis, zero, dots)
    return [Figure(title, caption if dots else caption.replace("; small dots: clients", ""), chart, _quartiles(there))]


def _quartiles(rows: Sequence[Violin]) -> Markup:
    tag = charts.tag
    titles = ("", "lowest", "lower quarter", "median", "upper quarter", "highest")
    body = []
    for row in rows:
        found = np.quantile(row.values, (0, 0.25, 0.5, 0.75, 1)).tolist()
        cells = [tag("td", row.name), *(tag("td", f"{v:.1f}") for v in found)]
        body.append(tag("tr", *cells, class_=f"g{row.group}"))
    return tag("table", tag("thead", tag("tr", *(tag("th", t) for t in titles))), tag("tbody", *body))


def sensitivity(view: View) -> Section:
    """What a sweep over a number shows."""
    found = curves.sensitivity(view.groups)
    if found is None:
        return Section("Sensitivity", [])
    series = []
    for i, (name, look) in enumerate(zip(found.lines, looks(list(found.lines)), strict=True)):
        for model in ("personal", "global"):
            last = curves.ends(found.lines[name], model)
            several = any(len(values) > 1 for _, values in last)
            spread = [(100 * min(v), 100 * max(v)) for _, v in last] if several else []
            points = [(x, 100 * fmean(v)) for x, v in last]
            # No legend hides these lines: they go through all groups.
            series.append(
                Series(f"{name}, {model}" if name else model, -1 - i, look, points, model == "global", spread)
            )
    there = [s for s in series if s.points]
    if not there:
        return Section("Sensitivity", [])
    axis = Axis(found.key, "{:g}".format, log=curves.spans_decades([x for s in there for x, _ in s.points]))
    caption = "Accuracy at the end for every value. Full lines, full dots: personal models. Dashed lines, hollow dots: "
    caption += "the global model." + _bands(there)
    title = f"Accuracy over {found.key}"
    chart = charts.lines(title, there, axis, ACCURACY, key=len(there) <= KEYED)
    return Section("Sensitivity", [Figure(title, caption, chart, charts.values_table(there, axis, ACCURACY))])


def models(view: View) -> Section:
    """How small the models are: ranks, sizes, zeros."""
    return Section("Low rank and sparsity", [*_sizes(view), *_zeros(view), *_ranks(view)])


def _sizes(view: View) -> list[Figure]:
    """Numbers that models need, in the first run of every group."""
    series = []
    for i, group, look in view.each():
        found = spaced([r for r in group.runs[0].records if r.get("parameters_personal")], POINTS)
        own = [(r["round"], fmean(r["parameters_personal"])) for r in found]
        shared = [(r["round"], r["parameters_global"]) for r in found]
        band = [(min(r["parameters_personal"]), max(r["parameters_personal"])) for r in found]
        two = own != shared and any(size for _, size in shared)
        spread = band if any(low < high for low, high in band) else []
        series.append(Series(view.named(group, "personal" if two else ""), i, look, own, False, spread))
        series += [Series(view.named(group, "global"), i, look, shared, True)] if two else []
    there = [s for s in series if s.points]
    bands = " (band: smallest and largest client)" if charts.has_bands(there) else ""
    caption = "Numbers in the parts of a model: factors where they are smaller, non-zeros elsewhere. "
    caption += f"Full: personal models{bands}. Dashed, hollow dots: the global model.{view.one_seed()}"
    return view.lines("Size of the models", caption, there, ROUND, Axis("numbers", count, low=0))


def count(value: float) -> str:
    """A number of parameters, short."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _zeros(view: View) -> list[Figure]:
    rows = []
    for i, group, look in view.each():
        if group.runs[0].summary["algorithm"] in SPARSE:
            name = group.name if view.several else "personal part"
            rows.append(Shown(name, i, group, look, "personal").violin([zero_shares(run) for run in group.runs]))
    caption = "Share of a client's personal part that is exactly zero, in the last evaluation."
    return _violins("Sparsity of the personal parts", caption, rows, Axis("zeros (%)", "{:.4g}".format, bounds=PERCENT))


def zero_shares(run: Run) -> dict[int, float]:
    """Client to the share of zeros in its personal part: its model's numbers, less those of the global model."""
    dense = run.summary["parameters"]["dense"]
    shared = [r["parameters_global"] for r in run.records if r.get("parameters_personal")]
    if not dense or not shared:
        return {}
    return {c: 1 - (n - shared[-1]) / dense for c, n in curves.by_client(run, "parameters_personal").items()}


def _ranks(view: View) -> list[Figure]:
    made = []
    for _, group, _ in view.each():
        records = [r for r in group.runs[0].records if r.get("rank")]
        if not records:
            continue
        layers = list(records[0]["rank"])
        picked = spaced(records, 48)
        full, known = _largest(group.runs[0], records, layers)
        rows = [_strip(layer, picked, full[layer]) for layer in layers[:LAYERS]]
        title = "Rank of every layer over rounds" + (f": {group.name}" if view.several else "")
        what = "the largest that its matrix can have" if known else "the largest that it had"
        caption = f"The fuller the colour, the closer a layer's rank to {what}. Right: rank at the end / that largest."
        if len(group.runs) > 1:
            caption += f" One of {len(group.runs)} seeds."
        if len(layers) > LAYERS:
            caption += f" The first {LAYERS} of {len(layers)} layers."
        first, last = (str(r["round"]) for r in (picked[0], picked[-1]))
        made.append(Figure(title, caption, charts.heat(title, rows, first, last, ROUND.label)))
    return made[:STRIPS]


def _largest(run: Run, records: Sequence[dict[str, Any]], layers: Sequence[str]) -> tuple[dict[str, int], bool]:
    """The full rank of every layer and True; where a run does not tell it, the largest rank it had and False."""
    full = run.summary.get("rank_full")
    if isinstance(full, dict) and all(isinstance(full.get(layer), int) and full[layer] > 0 for layer in layers):
        return full, True
    return {layer: max(r["rank"].get(layer, 0) for r in records) or 1 for layer in layers}, False


def _strip(layer: str, records: Sequence[dict[str, Any]], largest: int) -> charts.Strip:
    ranks = [r["rank"].get(layer, 0) for r in records]
    name = layer.removesuffix(".weight")
    told = [f"{name}, round {r['round']}: rank {n}" for r, n in zip(records, ranks, strict=True)]
    return charts.Strip(name, [min(1, n / largest) for n in ranks], told, f"{ranks[-1]} / {largest}")


def costs(view: View) -> Section:
    """Bytes and seconds of every round."""
    long = any(len(g.runs[0].records) > curves.BINS for g in view.groups)
    said = view.one_seed() + (" Means of neighbouring rounds." if long else "")
    return Section("Cost of a round", [*_bytes(view, said), *_seconds(view, said)])


def _bytes(view: View, said: str) -> list[Figure]:
    series = []
    for i, group, look in view.each():
        for way in ("down", "up"):
            points = curves.binned([(r["round"], r[f"bytes_{way}"]) for r in group.runs[0].records])
            if any(size for _, size in points):
                series.append(Series(view.named(group, way), i, look, points, way == "up"))
    axis = _bytes_axis("bytes of a round", max([y for s in series for _, y in s.points], default=0))
    caption = f"Messages to all sampled clients (full lines) and from them (dashed, hollow dots).{said}"
    return view.lines("Bytes per round", caption, series, ROUND, axis)


def _seconds(view: View, said: str) -> list[Figure]:
    """All of a round's time by group; by phase where there is one group only."""
    series = []
    for i, group, look in view.each():
        records = group.runs[0].records
        phases = {"": look} if view.several else {"all": look, "train": Look(1), "aggregate": Look(2)}
        for name, painted in phases.items():
            whole = name in ("", "all")
            spent = [(r["round"], r.get("seconds") if whole else r.get("seconds_by", {}).get(name)) for r in records]
            points = curves.binned([(n, seconds) for n, seconds in spent if seconds])
            series.append(Series(view.named(group, name), i, painted, points))
    steady = [y for s in series for _, y in s.points]
    # The first round of a compiled engine takes long; it must not flatten the others.
    log = bool(steady) and max(steady) > 8 * median(steady)
    axis = Axis("seconds", "{:.3g}".format, log=log, low=None if log else 0)
    return view.lines("Seconds per round", f"Measured time of a round, checkpoints aside.{said}", series, ROUND, axis)


def labels(view: View) -> Section:
    """Which labels clients hold."""
    told = [(run, counts) for run in view.counted() if (counts := curves.label_counts(run)) is not None]
    if not told:
        return Section("Data", [])
    counts = told[0][1]
    found = skew(counts)
    shown = counts[:CLIENTS]
    caption = f"Training samples of every client, one colour for each of {counts.shape[1]} labels. "
    caption += _whose_split(view, told)
    if len(counts) > len(shown):
        caption += f"The first {CLIENTS} clients. "
    caption += f"On average a client holds {found['labels_held']:.1f} labels, its most frequent one has "
    caption += (
        f"{percent(found['largest_share'])} of its samples, and it is {percent(found['distance'])} away from all "
    )
    caption += f"clients' ratio; {extremes(counts)}."
    axis = Axis("client", "{:.0f}".format, whole=True)
    chart = charts.stacked("Labels of every client", shown, axis, Axis("samples", "{:.4g}".format, low=0))
    return Section("Data", [Figure("Labels of every client", caption, chart, _label_table(shown))])


def _whose_split(view: View, told: Sequence[tuple[Run, np.ndarray]]) -> str:
    """Whose labels the first are, where others differ: a seed's, or a group's too if its seed has several."""
    run, counts = told[0]
    others = [other for other, theirs in told if not np.array_equal(theirs, counts)]
    if not others:
        return ""
    group = next(g for g in view.groups if any(r is run for r in g.runs))
    named = [group.name] if any(_split_seed(run) == _split_seed(other) for other in others) else []
    seeds = {_split_seed(r) for r, _ in told}
    named += [f"seed {_split_seed(run)}"] if len(seeds) > 1 else []
    return f"This is the split of {', '.join(named)}; others differ. "


def _split_seed(run: Run) -> Any:
    return run.config.get("data.seed", run.config.get("seed"))


def _label_table(counts: np.ndarray) -> Markup | None:
    if counts.shape[1] > 20:
        return None
    tag = charts.tag
    head = tag("tr", tag("th", "client"), *(tag("th", f"label {n}") for n in range(counts.shape[1])))
    body = [tag("tr", tag("td", i), *(tag("td", int(n)) for n in row)) for i, row in enumerate(counts)]
    return tag("table", tag("thead", head), tag("tbody", *body))
