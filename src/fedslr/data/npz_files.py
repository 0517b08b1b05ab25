"""Users' own arrays in npz files. Pickles are refused, so that a file cannot execute code."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedslr.core.errors import FedslrError, reason
from fedslr.data.client_data import ARRAY_NAMES, natural_order
from fedslr.data.federation import Federation

Arrays = dict[str, np.ndarray[Any, Any]]


def read_npz(path: Path, names: Sequence[str] = ARRAY_NAMES) -> Arrays:
    """Return the named arrays of an npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except FileNotFoundError:
        raise FedslrError(f"{path.absolute()}: does not exist; correct the path") from None
    except Exception as error:
        why = "it is a folder without .npz files" if path.is_dir() else reason(error).strip("'")
        why = why.replace("is not a file in the archive", "is missing")
        if isinstance(error, zipfile.BadZipFile):
            why = "it is damaged or only partly written"
        elif "allow_pickle" in why:
            why = "it holds Python objects, or is no npz file"
        raise FedslrError(
            f"{path.absolute()}: fedslr cannot read this as an npz file with the arrays {', '.join(names)}: {why}; "
            "write it with numpy.savez"
        ) from None


def npz_federation(path: Path, task: str = "classification") -> Federation:
    """Return the federation of a folder with one npz file per client, or of one npz file for all clients.

    Every file holds `x`, `y`, `x_test` and `y_test`. A file for all clients also holds `client` and `client_test`, the
    client of every training and test sample.
    """
    files = sorted(path.glob("*.npz"), key=natural_order)
    if not files:
        return _split_by_column(path, read_npz(path, (*ARRAY_NAMES, "client", "client_test")), task)
    return Federation.from_arrays(
        [read_npz(file) for file in files], name=path.stem, client_names=[file.stem for file in files], task=task
    )


def _split_by_column(path: Path, arrays: Arrays, task: str) -> Federation:
    columns = {part: arrays["client_test" if part.endswith("test") else "client"] for part in ARRAY_NAMES}
    for part, column in columns.items():
        if column.ndim != 1 or arrays[part].shape[:1] != column.shape:
            raise FedslrError(
                f"{path}: '{part}' of shape {list(arrays[part].shape)} has a client column of shape "
                f"{list(column.shape)}, expected one client for every sample"
            )
    # A client that only `client_test` names is refused later, because it has no training samples.
    names = np.union1d(arrays["client"], arrays["client_test"])
    clients = [{part: arrays[part][column == name] for part, column in columns.items()} for name in names]
    return Federation.from_arrays(clients, name=path.stem, client_names=list(map(str, names.tolist())), task=task)
