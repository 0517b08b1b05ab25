"""Personalized federated learning: a low-rank global model plus a sparse personal part for every client.

federation = fedslr.load("digits", clients=20, split="dirichlet", alpha=0.1, seed=0)
result = fedslr.run(fedslr.FedSLR(), federation, model="cnn", rounds=30, clients_per_round=5)
result.summary, result.global_params, result.personal_model(3)
"""

from __future__ import annotations

from fedslr.core import startup

startup.exit_on_ctrl_c_while_importing()

# ruff: noqa: E402 - everything below imports PyTorch
from fedslr.algorithms import ALGORITHMS
from fedslr.algorithms.apfl import APFL
from fedslr.algorithms.designs import GPGD, LPGD, LowRankLowRank, SparseLowRank, SparseSparse
from fedslr.algorithms.ditto import Ditto
from fedslr.algorithms.fedamp import FedAMP
from fedslr.algorithms.fedavg import FedAvg, FedProx
from fedslr.algorithms.feddyn import FedDyn
from fedslr.algorithms.fedslr import FedSLR
from fedslr.algorithms.fedspa import FedSpa
from fedslr.algorithms.ifca import IFCA
from fedslr.algorithms.layer_split import FedPer, FedRep, LGFedAvg
from fedslr.algorithms.local import Local
from fedslr.algorithms.perfedavg import PerFedAvg
from fedslr.algorithms.pfedme import PFedMe
from fedslr.algorithms.scaffold import Scaffold
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import CheckpointError, FedslrError, Interrupted, WireError
from fedslr.core.problem import Problem
from fedslr.core.types import Batch, LocalData, Params, Payload, Round
from fedslr.core.version import __version__
from fedslr.data import ClientData, Federation, load
from fedslr.engine.settings import Settings
from fedslr.export import export, load_exported
from fedslr.run.api import run
from fedslr.run.reopen import open_run
from fedslr.run.result import Result

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
    "Ditto",
    "FedAMP",
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
    "WireError",
    "__version__",
    "export",
    "load",
    "load_exported",
    "open_run",
    "run",
]
