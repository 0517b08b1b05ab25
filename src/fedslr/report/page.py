"""report.html: one file that shows a run, a comparison or a sweep, finished or not.

It needs nothing from elsewhere and is whole without JavaScript, which only adds values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

import fedslr
from fedslr.errors import FedslrError
from fedslr.report import amount, charts, curves, percent, table_rows, tables
from fedslr.report.charts import Axis, Series, Violin
from fedslr.report.colours import DARK, PALETTE, Look, looks
from fedslr.report.split import skew
from fedslr.report.tables import Group, Run
from fedslr.store import write_durably

MODELS = ("personal", "global")
SPARSE = {"fedslr", "lpgd", "gpgd", "sparse-sparse"}
"""Methods whose clients keep a sparse part beside the global model."""
DOTS = 2500
"""Clients that are drawn one by one in a chart, at most."""
STRIPS = 6
"""Heat maps of ranks, at most."""
LAYERS = 60
CLIENTS = 200
"""Clients whose labels are drawn, at most."""

ROUND = Axis("communication round", "{:.0f}".format, whole=True)
ACCURACY = Axis("accuracy, mean over clients (%)", "{:.4g}".format)


class Figure(NamedTuple):
    """A chart, what it shows, and its numbers."""

    title: str
    caption: str
    chart: Markup
    values: Markup | None = None


class Section(NamedTuple):
    title: str
    figures: Sequence[Figure]


class Card(NamedTuple):
    """One figure that stands for the whole."""

    value: str
    what: str
    note: str


class View:
    """Groups of runs, each with its look."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.groups = curves.groups(runs)
        self.looks = looks([g.name for g in self.groups])
        self.several = len(self.groups) > 1

    def each(self) -> list[tuple[int, Group, Look]]:
        return [(i, g, look) for i, (g, look) in enumerate(zip(self.groups, self.looks, strict=True))]

    def named(self, group: Group, part: str) -> str:
        """A series' name: the group's, if there are others, and which of its two models."""
        return f"{group.name}, {part}" if self.several and part else part or group.name


# --- sections -------------------------------------------------------------------------------------------------------


def drawn(title: str, caption: str, series: Sequence[Series], x: Axis, y: Axis, key: bool) -> list[Figure]:
    """A chart of lines with its numbers; none where there is nothing to draw."""
    there = [s for s in series if s.points]
    if not there:
        return []
    return [
        Figure(
            title,
            caption,
            charts.lines(title, there, x, y, key and 1 < len(there) <= 4),
            charts.values_table(there, x, y),
        )
    ]


def accuracy(view: View) -> Section:
    """Accuracy over rounds and over bytes."""
    by_round, by_bytes, sent = [], [], 0.0
    for i, group, look in view.each():
        for model in MODELS:
            if model == "global" and curves.is_personal(group) is False:
                continue
            found = curves.evaluations(group, f"accuracy_{model}")
            found = [found[int(n)] for n in charts.spaced(range(len(found)), 240)]
            dashed = model == "global"
            part = model if curves.is_personal(group) and curves.has_global(group) else "" if view.several else model
            several = len(group.runs) > 1
            spread = [(100 * min(s.values), 100 * max(s.values)) for s in found] if several else []
            name = view.named(group, part)
            points = [(s.round, 100 * s.mean) for s in found]
            by_round.append(Series(name, i, look, points, dashed, spread))
            if found and found[-1].bytes:
                sent = max(sent, found[-1].bytes)
                over = [(s.bytes, 100 * s.mean) for s in found]
                by_bytes.append(Series(name, i, look, over, dashed))
    styles = "Full lines: every client with its own model. Dashed: all with the global model."
    bands = " Bands: lowest and highest seed." if any(s.spread for s in by_round) else ""
    exact = _bytes_axis("sent by then, both ways", sent)
    return Section(
        "Accuracy",
        drawn("Accuracy over rounds", styles + bands, by_round, ROUND, ACCURACY, not view.several)
        + drawn(
            "Accuracy over bytes sent",
            "Bytes of all messages, down and up.",
            by_bytes,
            exact,
            ACCURACY,
            not view.several,
        ),
    )


def _bytes_axis(label: str, largest: float) -> Axis:
    """Bytes in the unit of the largest."""
    power = min(4, max(0, int(math.log10(largest) // 3))) if largest >= 1 else 0
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return Axis(f"{label} ({unit})", lambda v: f"{v / 1000**power:.4g}", low=0)


def clients(view: View) -> Section:
    """How accuracy is spread over clients, as it is and relative to FedAvg."""
    plain, against = [], []
    base = curves.baselines(view.runs)
    for i, group, look in view.each():
        for model in MODELS:
            if model == "global" and not curves.is_personal(group):
                continue
            key = f"accuracy_{model}_per_client"
            part = model if curves.is_personal(group) and curves.has_global(group) else "" if view.several else model
            name, hollow = view.named(group, part), model == "global"
            plain.append(_spread(name, i, look, [curves.by_client(r, key) for r in group.runs], group, hollow))
            if all(r.config.get("algorithm.name") != curves.BASELINE for r in group.runs):
                gains = [curves.relative(r, base, model) for r in group.runs]
                against.append(_spread(name, i, look, gains, group, hollow))
    shape = "Wide where many clients are. Bar: the middle half of them; large dot: the median; small dots: clients."
    over = "Right of the red line clients are better off than with FedAvg, left of it worse. " + shape
    points = Axis("accuracy less FedAvg's, percentage points", signed, low=0, high=0)
    made = _violins("Accuracy of every client", shape, plain, Axis("accuracy (%)", "{:.3g}".format))
    return Section(
        "Over clients", made + _violins("Accuracy relative to FedAvg", over, against, points, "as good as FedAvg")
    )


def signed(value: float) -> str:
    return f"{value:+.3g}" if value else "0"


def _spread(
    name: str, i: int, look: Look, found: Sequence[dict[int, float]], group: Group, hollow: bool, scale: float = 100
) -> Violin:
    """What clients of all seeds have, in per cent."""
    seeds = [f", seed {r.config.get('seed')}" if len(group.runs) > 1 else "" for r in group.runs]
    pairs = [(f"client {c}{seed}", scale * v) for one, seed in zip(found, seeds, strict=True) for c, v in one.items()]
    return Violin(name, i, look, [v for _, v in pairs], [who for who, _ in pairs], hollow)


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
        for model in MODELS:
            seen = [(x, curves.evaluations(g, f"accuracy_{model}")) for x, g in found.lines[name]]
            last = [(x, samples[-1].values) for x, samples in seen if samples]
            spread = [(100 * min(v), 100 * max(v)) for _, v in last] if any(len(v) > 1 for _, v in last) else []
            points = [(x, 100 * fmean(v)) for x, v in last]
            title = f"{name}, {model}" if name else model
            # No legend hides these lines: they go through all groups.
            series.append(Series(title, -1 - i, look, points, model == "global", spread))
    values = [x for line in found.lines.values() for x, _ in line]
    axis = Axis(found.key, "{:g}".format, log=curves.spans_decades(values))
    caption = "Accuracy at the end for every value. Full lines: personal models. Dashed: the global model."
    return Section("Sensitivity", drawn(f"Accuracy over {found.key}", caption, series, axis, ACCURACY, True))


def models(view: View) -> Section:
    """How small the models are: ranks, sizes, zeros."""
    return Section("Low rank and sparsity", [*_sizes(view), *_zeros(view), *_ranks(view)])


def _sizes(view: View) -> list[Figure]:
    series = []
    for i, group, look in view.each():
        run = group.runs[0]
        found = {"global": [], "personal": []}  # type: dict[str, list[tuple[float, float]]]
        band = []
        for record in run.records:
            if own := record.get("parameters_personal"):
                found["personal"].append((record["round"], fmean(own)))
                found["global"].append((record["round"], record["parameters_global"]))
                band.append((min(own), max(own)))
        if found["personal"] == found["global"]:
            found["global"] = []
        for model in MODELS:
            spread = band if model == "personal" and any(low < high for low, high in band) else []
            picked = [int(n) for n in charts.spaced(range(len(found[model])), 240)]
            points = [found[model][n] for n in picked]
            if any(y for _, y in points):
                name = view.named(group, model if found["global"] else "")
                series.append(Series(name, i, look, points, model == "global", [spread[n] for n in picked if spread]))
    caption = (
        "Numbers a deployed model needs: factors where they are smaller, non-zeros elsewhere. Full: personal models"
    )
    caption += " (band: smallest and largest client). Dashed: the global model."
    axis = Axis("numbers", count, low=0)
    return drawn("Size of the models", caption, series, ROUND, axis, not view.several)


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
            found = [_zero_shares(run) for run in group.runs]
            rows.append(_spread(name, i, look, found, group, False))
    caption = "Share of a client's personal part that is exactly zero, in the last evaluation."
    return _violins("Sparsity of the personal parts", caption, rows, Axis("zeros (%)", "{:.4g}".format))


def _zero_shares(run: Run) -> dict[int, float]:
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
        picked = [records[int(n)] for n in charts.spaced(range(len(records)), 48)]
        rows = [_strip(layer, picked) for layer in layers[:LAYERS]]
        title = "Rank of every layer over rounds" + (f": {group.name}" if view.several else "")
        caption = "The darker, the closer to the largest rank the layer had. Right: rank at the end / largest."
        if len(layers) > LAYERS:
            caption += f" The first {LAYERS} of {len(layers)} layers."
        first, last = (str(r["round"]) for r in (picked[0], picked[-1]))
        made.append(Figure(title, caption, charts.heat(title, rows, first, last, ROUND.label)))
    return made[:STRIPS]


def _strip(layer: str, records: Sequence[dict[str, Any]]) -> charts.Strip:
    ranks = [r["rank"].get(layer, 0) for r in records]
    largest = max(ranks) or 1
    name = layer.removesuffix(".weight")
    told = [f"{name}, round {r['round']}: rank {n}" for r, n in zip(records, ranks, strict=True)]
    return charts.Strip(name, [n / largest for n in ranks], told, f"{ranks[-1]} / {largest}")


def costs(view: View) -> Section:
    """Bytes and seconds of every round."""
    sent, spent = [], []
    for i, group, look in view.each():
        run = group.runs[0]
        for way, dashed in (("down", False), ("up", True)):
            points = curves.binned([(r["round"], r[f"bytes_{way}"]) for r in run.records])
            if any(y for _, y in points):
                sent.append(Series(view.named(group, way), i, look, points, dashed))
        phases = ("seconds",) if view.several else ("seconds", "train", "aggregate")
        for n, phase in enumerate(phases):
            seconds = [(r["round"], r.get("seconds_by", {}).get(phase) or r.get(phase)) for r in run.records]
            points = curves.binned([(x, y) for x, y in seconds if y])
            name = "all" if phase == "seconds" else phase
            spent.append(Series(view.named(group, "" if view.several else name), i, look if not n else Look(n), points))
    largest = max([y for s in sent for _, y in s.points], default=0)
    steady = [y for s in spent for _, y in s.points]
    # The first round of a compiled engine takes long; it must not flatten the others.
    log = bool(steady) and min(steady) > 0 and max(steady) > 8 * median(steady)
    seeds = " One seed of each." if any(len(g.runs) > 1 for g in view.groups) else ""
    bins = " Means of neighbouring rounds." if any(len(g.runs[0].records) > 160 for g in view.groups) else ""
    return Section(
        "Cost of a round",
        drawn(
            "Bytes per round",
            f"Messages to all sampled clients (full lines) and from them (dashed).{seeds}{bins}",
            sent,
            ROUND,
            _bytes_axis("bytes of a round", largest),
            not view.several,
        )
        + drawn(
            "Seconds per round",
            f"Measured time of a round, checkpoints aside.{seeds}{bins}",
            spent,
            ROUND,
            Axis("seconds", "{:.3g}".format, log=log, low=None if log else 0),
            not view.several,
        ),
    )


def labels(view: View) -> Section:
    """Which labels clients hold."""
    counts = curves.label_counts(view.runs)
    if counts is None:
        return Section("Data", [])
    found = skew(counts)
    shown = counts[:CLIENTS]
    caption = f"Training samples of every client, one colour for each of {counts.shape[1]} labels. "
    if len(counts) > len(shown):
        caption += f"The first {CLIENTS} clients. "
    caption += f"A client's most frequent label has {percent(found['largest_share'])} of its samples; it holds "
    caption += f"{found['labels_held']:.1f} labels, and is {percent(found['distance'])} away from all clients' ratio."
    axis = Axis("client", "{:.0f}".format, whole=True)
    chart = charts.stacked("Labels of every client", shown, axis, Axis("samples", "{:.4g}".format, low=0))
    return Section("Data", [Figure("Labels of every client", caption, chart, _label_table(shown))])


def _label_table(counts: np.ndarray) -> Markup | None:
    if counts.shape[1] > 20:
        return None
    tag = charts.tag
    head = tag("tr", tag("th", "client"), *(tag("th", f"label {n}") for n in range(counts.shape[1])))
    body = [tag("tr", tag("td", i), *(tag("td", int(n)) for n in row)) for i, row in enumerate(counts)]
    return tag("table", tag("thead", head), tag("tbody", *body))


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
    numbers = [r.summary.get("clients") for r in view.runs]
    seeds = sorted({r.config.get("seed", 0) for r in view.runs})
    rounds = max(r.summary["rounds"] for r in view.runs)
    parts = [f"{numbers[0]} clients" if len(set(numbers)) == 1 and numbers[0] else "", _plural(rounds, "round")]
    parts.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
    if len(view.runs) > 1:
        parts.append(f"{len(view.runs)} runs")
    return ", ".join(p for p in parts if p)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def notices(view: View) -> list[str]:
    """What a reader must know before believing a page."""
    told = []
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


def cards(view: View) -> list[Card]:
    return _best(view) if view.several else _headline(view.groups[0].runs)


def _headline(runs: Sequence[Run]) -> list[Card]:
    """The figures of one method; means over its seeds."""

    def mean(*keys: str) -> float | None:
        values = []
        for run in runs:
            value: Any = run.summary
            for key in keys:
                value = value.get(key) if value is not None else None
            values.append(value)
        return None if any(v is None for v in values) else fmean(values)

    own, shared = mean("accuracy", "personal"), mean("accuracy", "global")
    dense, size, personal = (mean("parameters", key) for key in ("dense", "global", "personal"))
    down, up = mean("bytes", "down") or 0, mean("bytes", "up") or 0
    found = [Card(percent(own), "accuracy of the personal models", "mean over clients")] if own is not None else []
    if shared is not None:
        found.append(Card(percent(shared), "accuracy of the global model", "mean over clients"))
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


def _best(view: View) -> list[Card]:
    """Who is first in what."""
    figures = {c.key: c for c in tables.columns()}

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


class Shown(NamedTuple):
    """A table as the page has it: the best of some columns are emphasised."""

    titles: list[str]
    rows: list[list[tuple[str, bool]]]
    labels: int


def overview(view: View) -> Shown:
    columns = tables.columns()
    made = tables.table(view.groups, columns)
    best = [[False] * len(made.titles) for _ in made.rows]
    for n, column in enumerate(columns, start=made.labels):
        means = [column.figures(g.runs)[0] for g in view.groups]
        known = [m for m in means if m is not None]
        if view.several and known and column.title.endswith("%"):
            for row, mean in zip(best, means, strict=True):
                row[n] = mean == max(known)
    rows = [list(zip(cells, marks, strict=True)) for cells, marks in zip(made.rows, best, strict=True)]
    return Shown(made.titles, rows, made.labels)


# --- the file -------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Run], live: str | None = None) -> str:
    """The report of some runs; `live` is the stamp of a page that looks for newer ones."""
    view = View(runs)
    made = (accuracy, sensitivity, clients, models, costs, labels)
    sections = [s for s in (make(view) for make in made) if s.figures]
    script = _part("report.js") + (_part("watch.js") if live is not None else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_part("report.html"))
    single = view.groups[0].runs[0] if len(view.runs) == 1 else None
    return template.render(
        title=title(view),
        subtitle=subtitle(view),
        notices=notices(view),
        cards=cards(view),
        legend=[(i, g.name, charts.paint(look), look.again) for i, g, look in view.each()] if view.several else [],
        sections=sections,
        table=overview(view),
        rows=table_rows(single.summary, single.records, _width(single)) if single and single.finished else [],
        runs=view.runs,
        version=fedslr.__version__,
        live=live,
        palette=list(zip(PALETTE, DARK, strict=True)),
        # Our own files, as they are.
        style=Markup(_part("report.css")),
        script=Markup(script),
        digest=digest,
    )


def _width(run: Run) -> int:
    return 8 if run.config.get("dtype") == "float64" else 4


def _part(name: str) -> str:
    return files("fedslr.report").joinpath(name).read_text()


def write_report(folders: Sequence[Path], out: Path) -> None:
    """The report of all runs in some folders, in one file."""
    try:
        write_durably(out, page(tables.find_runs(folders, unfinished=True)).encode())
    except OSError as error:
        raise FedslrError(f"--out: cannot write {out}: {error.strerror}") from None
