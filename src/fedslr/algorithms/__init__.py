"""All methods of the package; `ALGORITHMS` maps the name in a recipe to the dataclass that implements the method."""

from __future__ import annotations

from typing import Any

from fedslr.algorithms.apfl import APFL
from fedslr.algorithms.designs import GPGD, LPGD, LowRankLowRank, SparseLowRank, SparseSparse
from fedslr.algorithms.ditto import Ditto
from fedslr.algorithms.fedamp import FedAMP
from fedslr.algorithms.fedavg import FedAvg, FedProx
from fedslr.algorithms.feddyn import FedDyn
from fedslr.algorithms.fedslr import FedSLR
from fedslr.algorithms.fedslr_budget import FedSLRBudget
from fedslr.algorithms.fedspa import FedSpa
from fedslr.algorithms.ifca import IFCA
from fedslr.algorithms.layer_split import FedPer, FedRep, LGFedAvg
from fedslr.algorithms.local import Local
from fedslr.algorithms.perfedavg import PerFedAvg
from fedslr.algorithms.pfedme import PFedMe
from fedslr.algorithms.scaffold import Scaffold
from fedslr.core.algorithm import Algorithm

__all__ = [
    "ALGORITHMS",
    "APFL",
    "GPGD",
    "IFCA",
    "LPGD",
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
    "LGFedAvg",
    "Local",
    "LowRankLowRank",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "SparseLowRank",
    "SparseSparse",
]

_GLOBAL_MODEL = (FedSLR, FedSLRBudget, FedAvg, FedProx, FedDyn, Scaffold)
_PERSONAL_MODELS = (PerFedAvg, LGFedAvg, FedPer, FedRep, Ditto, APFL, PFedMe, FedAMP, IFCA, Local, FedSpa)
_OTHER_DESIGNS_OF_FEDSLR = (LPGD, GPGD, SparseSparse, SparseLowRank, LowRankLowRank)

ALGORITHMS: dict[str, type[Algorithm[Any, Any, Any]]] = {
    cls.name: cls for cls in (*_GLOBAL_MODEL, *_PERSONAL_MODELS, *_OTHER_DESIGNS_OF_FEDSLR)
}
