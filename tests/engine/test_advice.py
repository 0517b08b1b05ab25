"""A method advises on its hyperparameters while it runs; the engine passes its first advice on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedslr
from conftest import make_federation


def warnings_of(method: Any, rounds: int = 40, **changes: Any) -> list[str]:
    """Return what a run warns of whose layers are large enough for factors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    told: list[str] = []
    options = {"rounds": rounds, "clients_per_round": 2, "lr": 0.05, "evaluate_every": 1, **changes}
    fedslr.run(method, make_federation([5, 8, 6]), model, warn=told.append, **options)
    return told


def test_penalties_without_an_effect_are_reported_once():
    none = warnings_of(fedslr.FedSLR(eta_g=2, rank_penalty=1e-9, l1_penalty=1e-9))
    assert none == [
        "round 10: no layer has lost rank; raise rank_penalty tenfold, or use fedslr-budget, which takes a size"
    ]
    (large,) = warnings_of(fedslr.FedSLR(eta_g=2, rank_penalty=0, l1_penalty=1e-9))
    assert large.startswith("round 20: personal models are larger than the dense model; raise l1_penalty tenfold")
    (both,) = warnings_of(fedslr.FedSLR(eta_g=2, rank_penalty=1e-9, l1_penalty=1e-9), evaluate_every=40)
    assert both.startswith("round 40: no layer has lost rank and personal models are larger than the dense model; ")
    assert "raise rank_penalty and l1_penalty tenfold" in both


def test_short_runs_are_not_advised():
    assert not warnings_of(fedslr.FedSLR(eta_g=2, rank_penalty=1e-9, l1_penalty=1e-9), rounds=9)


@pytest.mark.parametrize(
    "method",
    [
        fedslr.FedSLR(eta_g=2, rank_penalty=0, l1_penalty=0),
        fedslr.FedSLR(eta_g=2, rank_penalty=0.05, l1_penalty=0.05),
        fedslr.LPGD(),
        fedslr.FedAvg(),
    ],
    ids=["without penalties", "with effect", "lpgd", "fedavg"],
)
def test_other_runs_are_not_advised(method):
    assert not warnings_of(method)
