"""What people look at: tables, figures and report.html. Here: how numbers are said, and the figures of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedslr.core.errors import FedslrError
from fedslr.storage.record import read_records

SUMMARY = {
    "algorithm": str,
    "dataset": str,
    "rounds": int,
    "accuracy": dict,
    "fairness": dict,
    "parameters": dict,
    "bytes": dict,
    "paper_gb": float,
    "seconds": dict,
    "rank": dict,
}
"""What the tables need of a run's summary."""

Records = Sequence[Mapping[str, Any]]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


def mean_over(records: Records) -> str:
    """Whom a mean accuracy is of: clients that have nothing to be tested on are not among them."""
    found = (r.get("accuracy_personal_per_client") for r in reversed(records))
    each: Sequence[float | None] = next(filter(None, found), [])
    tested = sum(one is not None for one in each)
    return f"mean over {tested} of {len(each)} clients" if tested < len(each) else "mean over clients"


def table_rows(summary: Mapping[str, Any], records: Records, width: int = 4) -> list[tuple[str, str, str]]:
    """The figures of a run: what, how much, against dense."""
    sizes, sent = summary["parameters"], summary["bytes"]
    dense = dense_bytes(records, sizes["dense"], width)

    def share(part: float, whole: float) -> str:
        return f"{100 * part / whole:.0f} % of dense" if whole else "–"

    spread = f" ± {sizes['personal_std']:,.0f}" if sizes["personal_std"] else ""
    over = mean_over(records)
    return [
        ("accuracy, global model", percent(summary["accuracy"]["global"]), over),
        ("accuracy, personal models", percent(summary["accuracy"]["personal"]), over),
        ("parameters, global", f"{sizes['global']:,}", share(sizes["global"], sizes["dense"])),
        ("parameters, personal", f"{sizes['personal']:,.0f}{spread}", share(sizes["personal"], sizes["dense"])),
        ("sent down", amount(sent["down"]), share(sent["down"], dense)),
        ("sent up", amount(sent["up"]), share(sent["up"], dense)),
        ("time", f"{sum(summary['seconds'].values()):.1f} s", ""),
    ]


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the records of a finished run."""
    try:
        summary = _read_summary(folder / "summary.json")
        return summary, read_records(folder, summary["rounds"])
    except FileNotFoundError as error:
        raise FedslrError(f"{folder}: no finished run ({Path(error.filename).name} is missing)") from None
    except OSError as error:
        raise FedslrError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text("utf-8"))
        if not isinstance(summary, dict) or not all(isinstance(summary.get(k), kind) for k, kind in SUMMARY.items()):
            raise ValueError("it is not what a run writes")
    except ValueError as error:
        again = "the command that made the run writes it anew with --resume"
        raise FedslrError(f"{path}: cannot be read: {error}; {again}") from None
    return summary
