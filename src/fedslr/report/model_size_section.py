"""The section of a report on the size of models: parameters, zeros and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from fedslr.report import curves
from fedslr.report import svg_axes as svg
from fedslr.report.line_chart import Series, has_bands
from fedslr.report.number_text import format_count
from fedslr.report.report_view import (
    MAX_POINTS,
    PERCENT_BOUNDS,
    ROUND,
    SPARSE_METHODS,
    Figure,
    ModelView,
    Section,
    View,
    lines_figure,
    violins_figure,
)
from fedslr.report.run_groups import Group
from fedslr.report.saved_runs import Run
from fedslr.report.svg_axes import px, tag

MAX_RANK_CHARTS = 6
MAX_LAYERS = 60
MAX_RANK_ROUNDS = 48
ROW_HEIGHT = 17


def model_size_section(view: View) -> Section:
    ranked = [g for g in view.groups if any(r["rank"] for r in g.runs[0].records)]
    ranks = [_rank_figure(view, group) for group in ranked[:MAX_RANK_CHARTS]]
    return Section("Low rank and sparsity", [*_sizes(view), *_zeros(view), *ranks])


def _sizes(view: View) -> list[Figure]:
    """Draw the parameters of the models in the first run of every group."""
    series = []
    for i, group, look in view.numbered():
        found = svg.spaced([r for r in group.runs[0].records if r.get("parameters_personal")], MAX_POINTS)
        own = [(r["round"], fmean(r["parameters_personal"])) for r in found]
        shared = [(r["round"], r["parameters_global"]) for r in found]
        band = [(min(r["parameters_personal"]), max(r["parameters_personal"])) for r in found]
        two = own != shared and any(size for _, size in shared)
        spread = band if any(low < high for low, high in band) else []
        series.append(Series(view.series_name(group, "personal" if two else ""), i, look, own, False, spread))
        series += [Series(view.series_name(group, "global"), i, look, shared, True)] if two else []
    bands = " (band: smallest and largest client)" if has_bands([s for s in series if s.points]) else ""
    caption = "Parameters as the paper counts them: factors where they are smaller, non-zeros elsewhere. "
    caption += f"Full: personal models{bands}. Dashed, hollow dots: the global model.{view.one_seed()}"
    return lines_figure("Size of the models", caption, series, ROUND, svg.Axis("parameters", format_count, low=0))


def _zeros(view: View) -> list[Figure]:
    rows = []
    for i, group, look in view.numbered():
        if group.runs[0].summary["algorithm"] in SPARSE_METHODS:
            name = group.name if view.several else "personal part"
            rows.append(ModelView(name, i, group, look, "personal").violin([zero_shares(run) for run in group.runs]))
    caption = "Share of a client's personal part that is exactly zero, in the last evaluation. "
    axis = svg.Axis("zeros (%)", "{:.4g}".format, bounds=PERCENT_BOUNDS)
    return violins_figure("Sparsity of the personal parts", caption, rows, axis)


def zero_shares(run: Run) -> dict[int, float]:
    """Return the share of zeros in every client's personal part: its model's parameters less the global model's."""
    dense = run.summary["parameters"]["dense"]
    shared = [r["parameters_global"] for r in run.records if r.get("parameters_personal")]
    if not dense or not shared:
        return {}
    return {c: 1 - (n - shared[-1]) / dense for c, n in curves.by_client(run, "parameters_personal").items()}


def _rank_figure(view: View, group: Group) -> Figure:
    run = group.runs[0]
    records = [r for r in run.records if r["rank"]]
    layers = list(records[0]["rank"])
    # An unfinished run does not know its full ranks yet.
    full = run.summary.get("rank_full") or {k: max(r["rank"].get(k, 0) for r in records) or 1 for k in layers}
    largest = "the largest that its matrix can have" if run.summary.get("rank_full") else "the largest that it had"
    caption = f"The fuller the colour, the closer a layer's rank to {largest}. Right: rank at the end / that largest."
    if len(group.runs) > 1:
        caption += f" One of {len(group.runs)} seeds."
    if len(layers) > MAX_LAYERS:
        caption += f" The first {MAX_LAYERS} of {len(layers)} layers."
    title = "Rank of every layer over rounds" + (f": {group.name}" if view.several else "")
    shown = {layer: full[layer] for layer in layers[:MAX_LAYERS]}
    return Figure(title, caption, _rank_chart(title, svg.spaced(records, MAX_RANK_ROUNDS), shown))


def _rank_chart(title: str, records: Sequence[dict[str, Any]], largest: dict[str, int]) -> Markup:
    """Draw a row of cells for each layer, one cell per record; the larger a rank, the fuller its colour."""
    names = {layer: layer.removesuffix(".weight") for layer in largest}
    ends = {layer: f"{records[-1]['rank'].get(layer, 0)} / {full}" for layer, full in largest.items()}
    letters = min(svg.MAX_NAME_LETTERS, max(map(len, names.values())))
    begin, end = 12 + svg.LETTER_WIDTH * letters, svg.WIDTH - 12 - svg.LETTER_WIDTH * max(map(len, ends.values()))
    wide, drawn = (end - begin) / len(records), []
    for y, (layer, full) in zip(range(0, ROW_HEIGHT * len(largest), ROW_HEIGHT), largest.items(), strict=True):
        name = svg.shortened(names[layer], letters)
        drawn.append(tag("text", name, x=px(begin - 6), y=px(y + 12), text_anchor="end"))
        for j, record in enumerate(records):
            rank = record["rank"].get(layer, 0)
            box = {"x": px(begin + wide * j), "y": y + 1, "width": px(wide + 0.3), "height": ROW_HEIGHT - 2}
            told = tag("title", f"{names[layer]}, round {record['round']}: rank {rank}")
            drawn.append(
                tag("rect", told, **box, fill_opacity=f"{0.08 + 0.92 * min(1, rank / full):.2f}", class_="cell")
            )
        drawn.append(svg.text(svg.WIDTH - 4, y + 12, ends[layer], "end"))
    bottom = ROW_HEIGHT * len(largest)
    drawn.append(svg.text(begin, bottom + 15, str(records[0]["round"])))
    drawn.append(svg.text(end, bottom + 15, str(records[-1]["round"]), "end"))
    drawn.append(svg.text((begin + end) / 2, bottom + 31, ROUND.label, "middle", "label"))
    return svg.chart(title, bottom + svg.BOTTOM_MARGIN - 6, *drawn, kind="heat")
