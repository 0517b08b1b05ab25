"""The public names, as `fedslr` has them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fedslr.algorithms import (
    ALGORITHMS,
    APFL,
    GPGD,
    LPGD,
    Ditto,
    FedAvg,
    FedDyn,
    FedPer,
    FedProx,
    FedRep,
    FedSLR,
    FedSpa,
    LGFedAvg,
    Local,
    LowRankLowRank,
    PerFedAvg,
    Scaffold,
    SparseLowRank,
    SparseSparse,
)
from fedslr.api import Result, run
from fedslr.config import Settings
from fedslr.data import ClientData, Federation, load
from fedslr.errors import CheckpointError, FedslrError, Interrupted, WireError
from fedslr.reopen import open_run
from fedslr.shipping import export, load_exported
from fedslr.types import Algorithm, Batch, LocalData, Params, Payload, Round, Task

try:
    __version__ = version("fedslr")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"

__all__ = [
    "ALGORITHMS",
    "APFL",
    "GPGD",
    "LPGD",
    "Algorithm",
    "Batch",
    "CheckpointError",
    "ClientData",
    "Ditto",
    "FedAvg",
    "FedDyn",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FedSpa",
    "Federation",
    "FedslrError",
    "Interrupted",
    "LGFedAvg",
    "Local",
    "LocalData",
    "LowRankLowRank",
    "Params",
    "Payload",
    "PerFedAvg",
    "Result",
    "Round",
    "Scaffold",
    "Settings",
    "SparseLowRank",
    "SparseSparse",
    "Task",
    "WireError",
    "__version__",
    "export",
    "load",
    "load_exported",
    "open_run",
    "run",
]
