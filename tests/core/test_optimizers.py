"""Optimizers of local steps against torch.optim, in float64. One client with full batches: FedAvg is plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedslr
from conftest import make_federation, mlp
from fedslr.core.optim import descend
from fedslr.core.optimizers import LocalSteps, Momentum, clip
from fedslr.core.problem import Problem
from fedslr.core.types import Batch, Round

LR, WD, STEPS = 0.1, 0.02, 12
torch_optimizers: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": ({}, torch.optim.SGD),
    "momentum": ({"momentum": 0.8}, lambda *a, **k: torch.optim.SGD(*a, **k, momentum=0.8)),
    "nesterov": ({"momentum": 0.7}, lambda *a, **k: torch.optim.SGD(*a, **k, momentum=0.7, nesterov=True)),
    "adam": ({"beta1": 0.8, "beta2": 0.95}, lambda *a, **k: torch.optim.Adam(*a, **k, betas=(0.8, 0.95))),
    "adamw": ({"eps": 1e-3}, lambda *a, **k: torch.optim.AdamW(*a, **k, eps=1e-3)),
}
every = pytest.mark.parametrize("name", torch_optimizers)


def trained(name: str, grad_clip: float) -> dict[str, torch.Tensor]:
    """Return the model after torch.optim's steps; weight decay is part of the clipped loss, unless it is decoupled."""
    client, model = make_federation([9]).clients[0], mlp().double()
    decoupled = name == "adamw"
    optimizer = torch_optimizers[name][1](model.parameters(), lr=LR, weight_decay=WD if decoupled else 0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(client.x.double()), client.y)
        if not decoupled:
            loss = loss + WD / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        if grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
    return {k: p.detach() for k, p in model.named_parameters()}


@every
@pytest.mark.parametrize("grad_clip", [0.0, 0.3])
def test_one_client_trains_as_torch_optim_does(name: str, grad_clip: float) -> None:
    settings = {"rounds": 1, "epochs": STEPS, "batch_size": 1000, "lr": LR, "weight_decay": WD, "dtype": "float64"}
    optimizer = {"name": name, **torch_optimizers[name][0]}
    result = fedslr.run(
        fedslr.FedAvg(), make_federation([9]), mlp(), optimizer=optimizer, grad_clip=grad_clip, **settings
    )
    found, wanted = result.global_params, trained(name, grad_clip)
    assert found is not None
    for key, x in wanted.items():
        torch.testing.assert_close(found[key], x, rtol=0, atol=1e-10)


def test_a_clipped_gradient_keeps_its_direction() -> None:
    g = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([[4.0]]).double()}
    clipped = clip(g, 0.5)
    torch.testing.assert_close(clipped["a"], 0.1 * g["a"], rtol=1e-6, atol=0)
    torch.testing.assert_close(clipped["b"], 0.1 * g["b"], rtol=1e-6, atol=0)
    assert all(torch.equal(x, g[k]) for k, x in clip(g, 50.0).items())


@every
def test_a_state_lasts_for_one_phase(name: str) -> None:
    """Two rounds are two runs of one round, of which the second starts where the first ended."""
    options: dict[str, Any] = {"clients_per_round": 1, "dtype": "float64", "schedule": "constant"}
    options |= {"batch_size": 1000, "optimizer": {"name": name, **torch_optimizers[name][0]}}
    federation = make_federation([9])
    whole = fedslr.run(fedslr.FedAvg(), federation, mlp(), rounds=2, **options)
    half = fedslr.run(fedslr.FedAvg(), federation, mlp(), rounds=1, **options)
    again = copy.deepcopy(mlp()).double()
    assert half.global_params is not None
    again.load_state_dict(half.global_params)
    rest = fedslr.run(fedslr.FedAvg(), federation, again, rounds=1, **options)
    assert whole.global_params is not None
    assert rest.global_params is not None
    for key, x in whole.global_params.items():
        torch.testing.assert_close(x, rest.global_params[key], rtol=0, atol=1e-12)


def test_a_proximal_step_of_ones_own_needs_plain_sgd() -> None:
    model = nn.Linear(2, 2)
    problem = Problem(model, cross_entropy, 0.0, LocalSteps(Momentum()))
    batch = Batch(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(fedslr.FedslrError, match="a proximal step needs plain sgd; set optimizer = 'sgd'"):
        descend(problem, problem.params(), [batch], Round(0, 1, 0.1, 1.0, 1, 1), after=lambda v, lr: v)
