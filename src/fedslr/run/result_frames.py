"""The figures of runs as pandas tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedslr.core.errors import FedslrError
from fedslr.report.curves import by_client
from fedslr.report.saved_runs import Run
from fedslr.storage.statistics import MODELS

if TYPE_CHECKING:
    from pandas import DataFrame

PER_CLIENT = "_per_client"
"""The end of the names of the fields of a record that have one value per client."""

COLLECTIONS = {"clients", "missing", "evaluated", "rank", "seconds_by", "parameters_personal", "diagnostics", "metric"}
"""The fields of a record that are no single figure."""


def frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> DataFrame:
    """Return rows as a pandas table.

    Raises:
        FedslrError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise FedslrError("pandas: tables need this package; pip install 'fedslr[table]'") from None
    made = pd.DataFrame.from_records([dict(row) for row in rows])
    return made if index is None else made.set_index(index)


def round_figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a record that belong to no single client; the size of personal models is their mean."""
    personal = record.get("parameters_personal")
    return {
        **{k: v for k, v in record.items() if k not in COLLECTIONS and not k.endswith(PER_CLIENT)},
        "parameters_personal": fmean(personal) if personal else None,
        "rank": sum(record["rank"].values()) if record.get("rank") else None,
        **{f"seconds_{phase}": value for phase, value in record["seconds_by"].items()},
        **{f"diagnostics_{name}": value for name, value in (record.get("diagnostics") or {}).items()},
    }


def rounds_frame(records: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return one row per round."""
    return frame(list(map(round_figures, records)), "round")


def clients_frame(run: Run, samples: Sequence[int], names: Sequence[str] | None) -> DataFrame:
    """Return one row per client, with the figures of the last evaluation."""
    keys = [run.metric.key(model, per_client=True) for model in MODELS]
    keys += [key for record in run.records for key, value in record.items() if key.endswith(PER_CLIENT) and value]
    found = {key.removesuffix(PER_CLIENT): by_client(run, key) for key in dict.fromkeys(keys)}
    found["parameters"] = by_client(run, "parameters_personal")
    rows = [
        {
            "client": number,
            "name": str(number) if names is None else names[number],
            "samples": count,
            **{column: values.get(number) for column, values in found.items()},
        }
        for number, count in enumerate(samples)
    ]
    return frame(rows, "client")
