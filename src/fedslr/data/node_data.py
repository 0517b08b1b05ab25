"""The data of one node of a deployed federation."""

from __future__ import annotations

from pathlib import Path

from fedslr.core.errors import FedslrError
from fedslr.data.federation import Federation
from fedslr.data.npz_files import read_npz

NODE_DATASET = "the nodes' own data"
"""The name of the dataset in results of a deployed federation."""


def read_node_data(path: Path, num_classes: int, task: str = "classification") -> Federation:
    """Return a federation of one client, from an npz file or from a folder with a single npz file."""
    files = sorted(path.glob("*.npz")) or [path]
    if len(files) > 1:
        raise FedslrError(f"data: {path} has {len(files)} .npz files, expected one file with x, y, x_test and y_test")
    return Federation.from_arrays(
        [read_npz(files[0])], num_classes, name=path.stem, client_names=[str(files[0])], task=task
    )
