"""Inference latency, the paper's appendix B: milliseconds per batch of models of falling rank, in several forms."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedslr.core.durable import write_durably
from fedslr.core.errors import FedslrError
from fedslr.export import files, forms
from fedslr.export.export import Source, about, describe, source
from fedslr.export.forms import Forms
from fedslr.export.timing import Runtime, milliseconds
from fedslr.report import amount, tables
from fedslr.run.reopen import open_run
from fedslr.run.result import Result

VARIANTS = ("dense", "factorised", "sparse", "chosen")
Row = dict[str, Any]
"""One model: its labels, parameters, bytes of its file, and milliseconds by runtime, device and variant."""


def variants(chosen: Source, runtime: Runtime) -> dict[str, Forms]:
    """The forms that are compared; a variant that would be the dense model is left out."""
    model, layers = chosen.model, chosen.layers
    sparse = forms.uniform(model, layers, "sparse") if runtime.sparse else {}
    factors = forms.smallest(model, layers)
    found = {"factorised": factors, "sparse": {**factors, **sparse} if sparse else {}}
    return {"dense": {}, **{name: plan for name, plan in found.items() if plan}}


def times(chosen: Source, runtime: Runtime, repeat: int) -> tuple[dict[str, float], Forms]:
    """Milliseconds of every variant and of the one chosen by measuring layers; and its forms."""
    best = forms.fastest(chosen.model, chosen.layers, chosen.x, runtime)
    plans = {**variants(chosen, runtime), "chosen": best}
    # What is the same is measured once.
    same = {name: next(other for other in plans if plans[other] == plan) for name, plan in plans.items()}
    ready = {
        name: runtime.ready(forms.shaped(chosen.model, chosen.layers, plans[name]), chosen.x)
        for name in set(same.values())
    }
    took = milliseconds(ready, repeat)
    return {name: took[other] for name, other in same.items()}, best


def measured(
    result: Result,
    client: int | None,
    batch: int,
    repeat: int,
    with_: Sequence[Runtime],
    warn: Callable[[str], None],
) -> Row:
    """One model of a run, with everything that runs it."""
    chosen = source(result, client, batch)
    data, numbers = files.encode(describe(about(result), chosen, {}), chosen.layers, chosen.others)
    row: Row = {"parameters": numbers, "bytes": len(data), "ms": {}, "chosen": {}}
    for runtime in with_:
        key = f"{runtime.name} {runtime.device}"
        try:
            row["ms"][key], row["chosen"][key] = times(chosen, runtime, repeat)
        except FedslrError as error:
            warn(f"left out: {key}: {error}")
    return row


def rows(
    folders: Sequence[Path],
    client: int | None,
    batch: int,
    repeat: int,
    with_: Sequence[Runtime],
    warn: Callable[[str], None],
) -> Iterator[Row]:
    """The models of some runs, one after another."""
    for group in tables.group(tables.find_runs(folders)):
        for run in group.runs:
            seed = {"seed": str(run.summary["seed"])} if len(group.runs) > 1 else {}
            result = open_run(run.folder, device="cpu", warn=warn)
            if client is None and not result.has_global_model:
                warn(f"left out: {run.folder}: {run.summary['algorithm']} has no global model (see --client)")
                continue
            row = measured(result, client, batch, repeat, with_, warn)
            yield {"run": str(run.folder), "labels": {**group.labels, **seed}, **row}


def table(found: Sequence[Row]) -> tables.Table:
    """The figures, the largest model first."""
    found = sorted(found, key=lambda row: -row["parameters"])
    times = {(key, name) for row in found for key, took in row["ms"].items() for name in took}
    measured_by = dict.fromkeys(key for row in found for key in row["ms"])
    columns = [(key, name) for key in measured_by for name in VARIANTS if (key, name) in times]
    labels = list(found[0]["labels"])
    titles = [*labels, "parameters", "file", *(f"{key} {name}" for key, name in columns)]
    cells = [
        [
            *row["labels"].values(),
            f"{row['parameters']:,}",
            amount(row["bytes"]),
            *(_ms(row["ms"].get(key, {}).get(name)) for key, name in columns),
        ]
        for row in found
    ]
    return tables.Table(titles, cells, len(labels))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def conditions(batch: int, repeat: int, client: int | None) -> Mapping[str, Any]:
    """What the figures were measured under."""
    return {
        "model": "global" if client is None else f"client {client}",
        "batch": batch,
        "repeat": repeat,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def save(path: Path, found: Sequence[Row], under: Mapping[str, Any]) -> None:
    write_durably(path, (json.dumps({**under, "rows": found}, indent=1) + "\n").encode())
