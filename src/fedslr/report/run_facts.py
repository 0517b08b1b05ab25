"""The main figures of one run as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedslr.report.number_text import format_bytes
from fedslr.storage.statistics import ACCURACY, Headline

Records = Sequence[Mapping[str, Any]]


def averaged_over(records: Records, metric: Headline = ACCURACY) -> str:
    """Return what the means of a run average over; clients without test data do not count."""
    found = (r.get(metric.key("personal", per_client=True)) for r in reversed(records))
    each: Sequence[float | None] = next(filter(None, found), [])
    tested = sum(one is not None for one in each)
    return f"mean over {tested} of {len(each)} clients" if tested < len(each) else "mean over clients"


def dense_bytes(records: Records, parameters: int, width: int = 4) -> int:
    """Return the bytes of the messages in one direction if each were a dense model."""
    return sum(len(r["clients"]) for r in records) * parameters * width


def run_facts(
    summary: Mapping[str, Any], records: Records, metric: Headline = ACCURACY, width: int = 4
) -> list[tuple[str, str, str]]:
    """Return rows of a name, a value and a comparison with dense models of `width` bytes per parameter."""
    sizes, sent, over = summary["parameters"], summary["bytes"], averaged_over(records, metric)
    dense = dense_bytes(records, sizes["dense"], width)

    def share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.0f} % of dense" if whole else "–"

    spread = f" ± {sizes['personal_std']:,.0f}" if sizes["personal_std"] else ""
    shipped = sizes.get("shipped", sizes["personal"])
    merged = [("parameters, personal, shipped", f"{shipped:,.0f}", share(shipped, sizes["dense"]))]
    return [
        (f"{metric.words}, global model", metric.text(summary[metric.name]["global"]), over),
        (f"{metric.words}, personal models", metric.text(summary[metric.name]["personal"]), over),
        ("parameters, global", f"{sizes['global']:,}", share(sizes["global"], sizes["dense"])),
        ("parameters, personal", f"{sizes['personal']:,.0f}{spread}", share(sizes["personal"], sizes["dense"])),
        *(merged if shipped < sizes["personal"] else []),
        ("sent down", format_bytes(sent["down"]), share(sent["down"], dense)),
        ("sent up", format_bytes(sent["up"]), share(sent["up"], dense)),
        ("time", f"{sum(summary['seconds'].values()):.1f} s", ""),
    ]
