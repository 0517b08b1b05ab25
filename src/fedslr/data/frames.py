"""Data frames of pandas, and the CSV and Parquet files that it reads, as columns of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError, reason, suggest
from fedslr.data.client_data import natural_order
from fedslr.data.decoded_cache import Array

READERS = {".csv": "read_csv", ".parquet": "read_parquet"}


def read_tables(path: Path) -> tuple[Any, Array | None]:
    """Return the frame of a CSV or Parquet file, or of all such files in a folder with the file of every row."""
    if not path.is_dir():
        return _read(path), None
    files = sorted((p for p in path.iterdir() if p.suffix.lower() in READERS), key=natural_order)
    if not files:
        raise FedslrError(f"data.name: {path} has no .csv and no .parquet files; put one file per client into it")
    frames = [_read(file) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if differing := set(frame.columns) ^ set(frames[0].columns):
            raise FedslrError(
                f"{file}: the columns differ from those of {files[0].name}: {', '.join(sorted(map(str, differing)))}; "
                "give all files the same columns"
            )
    # Importing pandas takes half a second.
    import pandas as pd

    return pd.concat(frames, ignore_index=True), np.repeat([file.stem for file in files], [len(f) for f in frames])


def _read(path: Path) -> Any:
    if path.suffix.lower() not in READERS:
        raise FedslrError(f"data.name: {path} is no .csv or .parquet file; convert it, or correct the path")
    try:
        import pandas as pd

        return getattr(pd, READERS[path.suffix.lower()])(path)
    except ImportError as error:
        advice = "pip install 'fedslr[table]'"
        raise FedslrError(f"{path}: fedslr needs {error.name or 'pyarrow'} to read this file; {advice}") from None
    except Exception as error:
        raise FedslrError(
            f"{path}: fedslr cannot read this table: {reason(error)}; correct the file or the path"
        ) from None


def column(frame: Any, name: str, option: str) -> Any:
    """Return a column of a frame; `option` names the user's option in the error about a missing column."""
    if not hasattr(frame, "columns"):
        raise FedslrError(f"df: got a {type(frame).__name__}, expected a pandas.DataFrame")
    if name not in frame.columns:
        raise FedslrError(f"{option}: the table has no column '{name}'; {suggest(name, map(str, frame.columns))}")
    return frame[name]


def complete_column(frame: Any, name: str, option: str) -> Array:
    """Return a column of a frame without missing values as an array."""
    values = column(frame, name, option)
    if absent := int(values.isna().sum()):
        raise FedslrError(f"column '{name}': {absent} of {len(values)} rows have no value; drop or complete these rows")
    kinds = {"i": np.int64, "u": np.int64, "f": np.float64, "b": np.bool_}
    return np.asarray(values.to_numpy(kinds.get(values.dtype.kind, np.object_)))


def feature_columns(frame: Any, names: Sequence[str] | None, others: Sequence[Any]) -> Mapping[str, Array]:
    """Return the named columns, or all apart from `others`: numbers, NaN if not finite, or texts, None if missing."""
    chosen = [name for name in frame.columns if name not in others] if names is None else names
    if not chosen:
        raise FedslrError("features: the table has no columns left; name at least one column of numbers or categories")
    return {str(name): _values(str(name), column(frame, name, "features")) for name in chosen}


def _values(name: str, values: Any) -> Array:
    if values.dtype.kind in "biuf":
        numbers = np.array(values.to_numpy(np.float64, na_value=np.nan))
        return np.where(np.isfinite(numbers), numbers, np.nan)
    if values.dtype.kind in "mMc":
        raise FedslrError(f"column '{name}' holds {values.dtype}; convert it to numbers, or choose others by features")
    return np.array([None if absent else str(v) for v, absent in zip(values, values.isna(), strict=True)], object)
