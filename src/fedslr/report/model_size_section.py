"""The section of a report on the size of models: parameters, zeros and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedslr.report import curves
from fedslr.report.line_chart import Series, has_bands
from fedslr.report.number_text import format_count
from fedslr.report.rank_chart import RankRow, rank_chart
from fedslr.report.report_view import (
    MAX_POINTS,
    PERCENT_BOUNDS,
    ROUND,
    SPARSE_METHODS,
    Figure,
    ModelView,
    Section,
    View,
    violins_figure,
)
from fedslr.report.saved_runs import Run
from fedslr.report.svg_axes import Axis, spaced

MAX_RANK_CHARTS = 6
MAX_LAYERS = 60
MAX_RANK_ROUNDS = 48


def model_size_section(view: View) -> Section:
    return Section("Low rank and sparsity", [*_sizes(view), *_zeros(view), *_ranks(view)])


def _sizes(view: View) -> list[Figure]:
    """Draw the parameters of the models in the first run of every group."""
    series = []
    for i, group, look in view.numbered():
        found = spaced([r for r in group.runs[0].records if r.get("parameters_personal")], MAX_POINTS)
        own = [(r["round"], fmean(r["parameters_personal"])) for r in found]
        shared = [(r["round"], r["parameters_global"]) for r in found]
        band = [(min(r["parameters_personal"]), max(r["parameters_personal"])) for r in found]
        two = own != shared and any(size for _, size in shared)
        spread = band if any(low < high for low, high in band) else []
        series.append(Series(view.series_name(group, "personal" if two else ""), i, look, own, False, spread))
        series += [Series(view.series_name(group, "global"), i, look, shared, True)] if two else []
    bands = " (band: smallest and largest client)" if has_bands([s for s in series if s.points]) else ""
    caption = "Numbers in the parts of a model: factors where they are smaller, non-zeros elsewhere. "
    caption += f"Full: personal models{bands}. Dashed, hollow dots: the global model.{view.one_seed()}"
    return view.lines("Size of the models", caption, series, ROUND, Axis("numbers", format_count, low=0))


def _zeros(view: View) -> list[Figure]:
    rows = []
    for i, group, look in view.numbered():
        if group.runs[0].summary["algorithm"] in SPARSE_METHODS:
            name = group.name if view.several else "personal part"
            rows.append(ModelView(name, i, group, look, "personal").violin([zero_shares(run) for run in group.runs]))
    caption = "Share of a client's personal part that is exactly zero, in the last evaluation."
    axis = Axis("zeros (%)", "{:.4g}".format, bounds=PERCENT_BOUNDS)
    return violins_figure("Sparsity of the personal parts", caption, rows, axis)


def zero_shares(run: Run) -> dict[int, float]:
    """Return the share of zeros in every client's personal part: its model's parameters less the global model's."""
    dense = run.summary["parameters"]["dense"]
    shared = [r["parameters_global"] for r in run.records if r.get("parameters_personal")]
    if not dense or not shared:
        return {}
    return {c: 1 - (n - shared[-1]) / dense for c, n in curves.by_client(run, "parameters_personal").items()}


def _ranks(view: View) -> list[Figure]:
    made: list[Figure] = []
    for group in view.groups:
        records = [r for r in group.runs[0].records if r["rank"]]
        if not records or len(made) == MAX_RANK_CHARTS:
            continue
        layers = list(records[0]["rank"])
        picked = spaced(records, MAX_RANK_ROUNDS)
        full, known = _largest_ranks(group.runs[0], records, layers)
        rows = [_rank_row(layer, picked, full[layer]) for layer in layers[:MAX_LAYERS]]
        title = "Rank of every layer over rounds" + (f": {group.name}" if view.several else "")
        what = "the largest that its matrix can have" if known else "the largest that it had"
        caption = f"The fuller the colour, the closer a layer's rank to {what}. Right: rank at the end / that largest."
        if len(group.runs) > 1:
            caption += f" One of {len(group.runs)} seeds."
        if len(layers) > MAX_LAYERS:
            caption += f" The first {MAX_LAYERS} of {len(layers)} layers."
        first, last = (str(r["round"]) for r in (picked[0], picked[-1]))
        made.append(Figure(title, caption, rank_chart(title, rows, first, last, ROUND.label)))
    return made


def _largest_ranks(run: Run, records: Sequence[dict[str, Any]], layers: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Return the full rank of every layer and True; for an unfinished run, the largest rank it had and False."""
    if full := run.summary.get("rank_full"):
        return full, True
    return {layer: max(r["rank"].get(layer, 0) for r in records) or 1 for layer in layers}, False


def _rank_row(layer: str, records: Sequence[dict[str, Any]], largest: int) -> RankRow:
    ranks = [r["rank"].get(layer, 0) for r in records]
    name = layer.removesuffix(".weight")
    titles = [f"{name}, round {r['round']}: rank {n}" for r, n in zip(records, ranks, strict=True)]
    return RankRow(name, [min(1, n / largest) for n in ranks], titles, f"{ranks[-1]} / {largest}")
