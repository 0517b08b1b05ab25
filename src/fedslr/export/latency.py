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
from fedslr.export import layer_forms, safetensors_file
from fedslr.export.layered_model import Forms, LayeredModel, about_run, describe, model_of_run
from fedslr.export.runtimes import Runtime
from fedslr.report.number_text import format_bytes
from fedslr.report.result_tables import Table
from fedslr.report.run_groups import group_runs
from fedslr.report.saved_runs import find_runs
from fedslr.run.reopen import open_run
from fedslr.run.result import Result, find_client

VARIANTS = ("dense", "factorised", "sparse", "chosen")
Row = dict[str, Any]
"""One model: its labels, parameters, bytes of its file, and milliseconds by runtime, device and variant."""
Warn = Callable[[str], None]


def variants(source: LayeredModel, runtime: Runtime) -> dict[str, Forms]:
    """Return the forms to compare, without those that equal the dense model."""
    factors = layer_forms.smallest(source)
    sparse = layer_forms.uniform(source, "sparse") if runtime.sparse else {}
    found = {"dense": {}, "factorised": factors, "sparse": {**factors, **sparse} if sparse else {}}
    return {name: forms for name, forms in found.items() if forms or name == "dense"}


def measure(result: Result, source: LayeredModel, repeat: int, runtimes: Sequence[Runtime], warn: Warn) -> Row:
    """Return the figures of one model of a run with every runtime."""
    data, numbers = safetensors_file.encode(describe(about_run(result), source, {}), source.layers, source.others)
    row: Row = {"parameters": numbers, "bytes": len(data), "ms": {}, "chosen": {}}
    for runtime in runtimes:
        key = f"{runtime.name} {runtime.device}"
        try:
            best = layer_forms.fastest(source, runtime)
            plans = {**variants(source, runtime), "chosen": best}
            row["ms"][key] = layer_forms.plan_times(source, plans, runtime, repeat)
            row["chosen"][key] = best
        except FedslrError as error:
            warn(f"left out: {key}: {error}")
    return row


def measured_rows(
    folders: Sequence[Path], client: str | None, batch: int, repeat: int, runtimes: Sequence[Runtime], warn: Warn
) -> Iterator[Row]:
    """Yield the figures of the models of some runs, one after another."""
    for group in group_runs(find_runs(folders)):
        for run in group.runs:
            seed = {"seed": str(run.summary["seed"])} if len(group.runs) > 1 else {}
            result = open_run(run.folder, device="cpu", warn=warn)
            if client is None and not result.has_global_model:
                warn(f"left out: {run.folder}: {run.summary['algorithm']} has no global model (see --client)")
                continue
            number = None if client is None else find_client(client, result.federation)
            row = measure(result, model_of_run(result, number, batch), repeat, runtimes, warn)
            yield {"run": str(run.folder), "labels": {**group.labels, **seed}, **row}


def latency_table(found: Sequence[Row]) -> Table:
    """Return the figures as a table, the largest model first."""
    found = sorted(found, key=lambda row: -row["parameters"])
    measured = {(key, name): None for row in found for key, took in row["ms"].items() for name in took}
    keys = dict.fromkeys(key for key, _ in measured)
    columns = [(key, name) for key in keys for name in VARIANTS if (key, name) in measured]
    rows = []
    for row in found:
        taken = [row["ms"].get(key, {}).get(name) for key, name in columns]
        cells = [*row["labels"].values(), f"{row['parameters']:,}", format_bytes(row["bytes"])]
        rows.append([*cells, *("–" if value is None else f"{value:.2f}" for value in taken)])
    labels = list(found[0]["labels"])
    return Table([*labels, "parameters", "file", *(f"{key} {name}" for key, name in columns)], rows, len(labels))


def conditions(batch: int, repeat: int, client: str | None) -> Mapping[str, Any]:
    """Return the conditions of a measurement: the model, the batch and the machine."""
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
