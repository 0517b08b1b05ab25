"""Personalized federated learning: FedSLR and the methods that it is compared with.

FedSLR trains a low-rank global model and a sparse personal part for every client.

Example:
    federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)
    result = fedslr.run(fedslr.FedSLR(), federation, model="cnn", rounds=30, clients_per_round=5)
    result.summary, result.global_params, result.personal_model(3)
"""

from __future__ import annotations

from fedslr.core import startup

startup.exit_on_ctrl_c_while_importing()

# ruff: noqa: E402 - all modules below import PyTorch
from fedslr.algorithms import (
    ALGORITHMS,
    APFL,
    GPGD,
    IFCA,
    LPGD,
    Ditto,
    FedAMP,
    FedAvg,
    FedDyn,
    FedPer,
    FedProx,
    FedRep,
    FedSLR,
    FedSLRBudget,
    FedSpa,
    LGFedAvg,
    Local,
    LowRankLowRank,
    PerFedAvg,
    PFedMe,
    Scaffold,
    SparseLowRank,
    SparseSparse,
)
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import CheckpointError, FedslrError, Interrupted, WireError
from fedslr.core.problem import Problem
from fedslr.core.types import Batch, LocalData, Params, Payload, Round
from fedslr.core.version import __version__
from fedslr.data import ClientData, Federation, load
from fedslr.engine.settings import Settings
from fedslr.export import export, load_exported
from fedslr.report.html_report import write_report
from fedslr.run.api import run
from fedslr.run.comparison import Comparison, compare
from fedslr.run.reopen import open_run
from fedslr.run.result import Result
from fedslr.run.trained import TrainedModels

__all__ = [
    "ALGORITHMS",
    "APFL",
    "GPGD",
    "IFCA",
    "LPGD",
    "Algorithm",
    "Batch",
    "CheckpointError",
    "ClientData",
    "Comparison",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedDyn",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FedSLRBudget",
    "FedSpa",
    "Federation",
    "FedslrError",
    "Interrupted",
    "LGFedAvg",
    "Local",
    "LocalData",
    "LowRankLowRank",
    "PFedMe",
    "Params",
    "Payload",
    "PerFedAvg",
    "Problem",
    "Result",
    "Round",
    "Scaffold",
    "Settings",
    "SparseLowRank",
    "SparseSparse",
    "TrainedModels",
    "WireError",
    "__version__",
    "compare",
    "export",
    "load",
    "load_exported",
    "open_run",
    "run",
    "write_report",
]
