"""What people look at: curves of a run or of several, tables, and report.html."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from fedslr.errors import FedslrError
from fedslr.record import read_records
from fedslr.store import write_durably

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe & Ito's palette, distinct to the colour-blind."""

SUMMARY = {"algorithm", "accuracy", "fairness", "parameters", "bytes", "paper_gb", "seconds", "rank"}
"""What the tables need of a run's summary."""

Records = Sequence[Mapping[str, Any]]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def amount(size: float) -> str:
    """Bytes as a person says them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def dense_bytes(records: Records, parameters: int, width: int = 4) -> int:
    """What the same messages would take if every one were a dense model, one way."""
    return sum(len(r["clients"]) for r in records) * parameters * width


def table_rows(summary: Mapping[str, Any], records: Records, width: int = 4) -> list[tuple[str, str, str]]:
    """The figures of a run: what, how much, against dense."""
    sizes, sent = summary["parameters"], summary["bytes"]
    dense = dense_bytes(records, sizes["dense"], width)

    def share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.0f} % of dense" if whole else "–"

    spread = f" ± {sizes['personal_std']:,.0f}" if sizes["personal_std"] else ""
    return [
        ("accuracy, global model", percent(summary["accuracy"]["global"]), "mean over clients"),
        ("accuracy, personal models", percent(summary["accuracy"]["personal"]), "mean over clients"),
        ("parameters, global", f"{sizes['global']:,}", share(sizes["global"], sizes["dense"])),
        ("parameters, personal", f"{sizes['personal']:,.0f}{spread}", share(sizes["personal"], sizes["dense"])),
        ("sent down", amount(sent["down"]), share(sent["down"], dense)),
        ("sent up", amount(sent["up"]), share(sent["up"], dense)),
        ("time", f"{sum(summary['seconds'].values()):.1f} s", ""),
    ]


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the records of a finished run."""
    try:
        summary, records = json.loads((folder / "summary.json").read_text()), read_records(folder)
        if not records or not isinstance(summary, dict) or not summary.keys() >= SUMMARY:
            raise ValueError("summary.json or metrics.jsonl is not what a run writes")
        return summary, records
    except FileNotFoundError as error:
        raise FedslrError(f"{folder}: no finished run ({Path(error.filename).name} is missing)") from None
    except (OSError, ValueError) as error:
        raise FedslrError(f"{folder}: cannot be read as a run: {error}") from None


def accuracy_figure(runs: Mapping[str, Records]) -> Figure:
    """Accuracy over rounds: personal models as full lines, global models dashed, one colour per run."""
    from matplotlib.figure import Figure  # late: a second of start-up

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes: Axes = figure.subplots()
    for colour, (name, records) in zip(COLOURS * (1 + len(runs) // len(COLOURS)), runs.items(), strict=False):
        own, shared = (
            [(r["round"], 100 * r[key]) for r in records if r.get(key) is not None]
            for key in ("accuracy_personal", "accuracy_global")
        )
        curves = (
            [(own, "-", name)]
            if own == shared
            else [(own, "-", f"{name}, personal"), (shared, "--", f"{name}, global")]
        )
        for points, style, label in curves:
            if points:
                marker = "o" if len(points) == 1 else None
                axes.plot(*zip(*points, strict=True), style, color=colour, marker=marker, label=label)
    axes.set(xlabel="communication round", ylabel="accuracy, mean over clients (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")
    return figure


def mean_records(runs: Sequence[Records]) -> list[dict[str, Any]]:
    """Accuracies of several seeds, averaged round by round where all of them were evaluated."""
    by_round = [{r["round"]: r for r in records if r.get("accuracy_personal") is not None} for records in runs]
    shared = sorted(set.intersection(*(set(found) for found in by_round)))
    out = []
    for number in shared:
        same = [found[number] for found in by_round]
        mean = {
            key: None if any(r.get(key) is None for r in same) else sum(r[key] for r in same) / len(same)
            for key in ("accuracy_global", "accuracy_personal")
        }
        out.append({"round": number, **mean})
    return out


def write_report(folder: Path, summary: Mapping[str, Any], records: Records, config: str, width: int = 4) -> None:
    """report.html: one self-contained file."""
    drawing = io.StringIO()
    accuracy_figure({summary["algorithm"]: records}).savefig(drawing, format="svg", transparent=True)
    svg = drawing.getvalue()
    source = files("fedslr.report").joinpath("report.html").read_text()
    page = jinja2.Environment(autoescape=True).from_string(source)
    text = page.render(
        summary=summary,
        rows=table_rows(summary, records, width),
        ranks=sorted(summary["rank"].items()),
        config=config,
        rerunnable=summary["rerunnable"],
        # Drawn by matplotlib from numbers and the method's registered name, so it is markup we trust.
        chart=Markup(svg[svg.index("<svg") :]),
    )
    write_durably(folder / "report.html", text.encode())
