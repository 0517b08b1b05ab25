"""The convergence theory, watched on a convex problem whose local problems are solved exactly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedslr
from conftest import make_federation, mlp
from fedslr.algorithms import theory
from fedslr.core import prox, tree
from fedslr.core.problem import Problem
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings

SIZES, WD, LAM = [9, 14, 6, 11], 0.3, 0.05
CONVEX = make_federation(SIZES, (5,), classes=4)


def softmax_regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 4).double()


def smoothness() -> float:
    """An upper bound on every client's L: ½, a bound of softmax's Hessian, times the inputs' largest eigenvalue."""
    bounds = []
    for c in CONVEX.clients:
        x = torch.cat([c.x, torch.ones(len(c.x), 1)], dim=1).double()
        bounds.append(0.5 * float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1]) + WD)
    return max(bounds)


def simulate(rounds: int, every: int, **options: Any) -> Simulation:
    L = smoothness()
    eta_g = 1 / (2 * L)
    settings = Settings(
        rounds=rounds,
        clients_per_round=len(SIZES),
        batch_size=1000,
        epochs=40,
        lr=1 / (L + 1 / eta_g),
        lr_decay=1.0,
        weight_decay=WD,
        dtype="float64",
        evaluate_every=every,
        diagnostics=True,
    )
    method = fedslr.FedSLR(**{"eta_g": eta_g, "rank_penalty": LAM, "l1_penalty": 0.02, **options})
    simulation = Simulation(method, CONVEX, softmax_regression(), settings)
    simulation.found = [r.diagnostics for r in simulation.rounds() if r.diagnostics is not None]
    return simulation


@pytest.fixture(scope="module")
def early() -> Simulation:
    return simulate(40, 1)


@pytest.fixture(scope="module")
def late() -> Simulation:
    return simulate(300, 100)


def test_the_potential_never_increases(early):
    """From the second round on: before it γ_i = 0 is no gradient yet."""
    potentials = [d["potential"] for d in early.found]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(potentials[1:]))
    assert potentials[-1] < potentials[1] - 1e-3


def test_the_residual_vanishes(late):
    found = [d["stationarity"] for d in late.found]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1e-5
    assert found[-1] < found[0] / 100


def test_duals_tend_to_gradients(early, late):
    assert late.found[-1]["dual_gap"] < 1e-5
    assert late.found[-1]["dual_gap"] < early.found[0]["dual_gap"] / 1000
    assert max(d["dual_mismatch"] for d in early.found + late.found) < 1e-12


def test_the_limit_solves_p1(late):
    """Proximal gradient descent on the pooled problem, written out here, ends where the federation ended."""
    objectives = late_objectives(late)
    L, w = smoothness(), {k: p.detach().clone() for k, p in softmax_regression().named_parameters()}
    for _ in range(3000):
        g = tree.mean([f.gradient(w) for f in objectives])
        moved = tree.map(lambda w, g: w - g / L, w, g)
        w = {k: prox.singular_value_threshold(x, LAM / L).dense() if x.ndim > 1 else x for k, x in moved.items()}
    found = late.state.global_model()
    assert float(tree.norm(tree.sub(w, found))) < 1e-4
    # The penalty shapes the solution: the matrix has lost rank.
    assert late.state.delivery.ranks()["weight"] < 4


def late_objectives(simulation: Simulation) -> list[theory.Objective]:
    return [theory.Objective(simulation.problem, c.x, c.y) for c in simulation.state.work.clients]


def test_the_step_size_bound_is_honest(early):
    """The estimate of L stays below the true bound, so a warning is never given in vain."""
    assert all(0 < d["smoothness"] <= smoothness() + 1e-9 for d in early.found)
    assert all(d["eta_g_bound"] == pytest.approx(1 / (2 * d["smoothness"])) for d in early.found)


def test_a_large_step_is_warned_of():
    told: list[str] = []
    settings = Settings(rounds=1, diagnostics=True, dtype="float64")
    list(Simulation(fedslr.FedSLR(eta_g=100), CONVEX, softmax_regression(), settings, warn=told.append).rounds())
    assert len(told) == 1
    assert "eta_g = 100 is above 1/(2L)" in told[0]
    told.clear()
    list(Simulation(fedslr.FedSLR(eta_g=1e-3), CONVEX, softmax_regression(), settings, warn=told.append).rounds())
    assert told == []


def test_curvature_is_the_largest_eigenvalue():
    problem = Problem(mlp(5, 4).double(), cross_entropy, weight_decay=0.3)
    client = CONVEX.clients[1]
    objective = theory.Objective(problem, client.x, client.y)
    w = problem.params()
    names, shapes = list(w), [w[k].shape for k in w]

    def value(flat: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, [s.numel() for s in shapes])
        return objective.value({k: p.reshape(s) for k, p, s in zip(names, parts, shapes, strict=True)})

    hessian = torch.autograd.functional.hessian(value, torch.cat([x.flatten() for x in w.values()]))
    exact = float(torch.linalg.eigvalsh(hessian).abs().max())
    assert objective.curvature(w, steps=500, tolerance=1e-9) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_the_residual_bounds_the_proximal_step(seed):
    """‖(w − prox_t(w − t∇f))/t‖ ≤ dist(0, ∇f + ∂R), for any w and t; both vanish together."""
    generator = torch.Generator().manual_seed(seed)
    a, b, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 2), (2, 5), (6, 5)))
    w = a @ b
    distance = theory.stationarity({"w": w}, {"w": g}, 0.3)
    for t in (0.01, 0.1, 1.0):
        step = (w - prox.singular_value_threshold(w - t * g, 0.3 * t).dense()) / t
        assert float(step.norm()) <= distance + 1e-9
    # At t → 0 they agree: the proximal step is the least subgradient.
    step = (w - prox.singular_value_threshold(w - 1e-6 * g, 0.3e-6).dense()) / 1e-6
    assert float(step.norm()) == pytest.approx(distance, rel=1e-3)


def test_the_residual_takes_factors_as_it_takes_matrices():
    x = torch.randn(7, 5, dtype=torch.float64)
    factors = prox.singular_value_threshold(x, 1.5)
    g = {"w": torch.randn(7, 5, dtype=torch.float64)}
    assert theory.stationarity({"w": factors}, g, 0.2) == pytest.approx(
        theory.stationarity({"w": factors.dense()}, g, 0.2)
    )
    nothing = prox.singular_value_threshold(x, 1e3)
    assert theory.stationarity({"w": nothing}, g, 1e3) == 0


def test_the_gradient_mapping_vanishes_at_a_solution_of_p2():
    problem = Problem(softmax_regression(), cross_entropy, weight_decay=WD)
    client = CONVEX.clients[0]
    objective = theory.Objective(problem, client.x, client.y)
    w = problem.params()
    p = tree.zeros(w)
    start = theory.gradient_mapping(w, p, objective, 0.2, 0.02)
    for _ in range(2000):
        g = tree.map(lambda g, p: g + WD * p, objective.data_gradient(tree.add(w, p)), p)
        p = tree.map(lambda p, g: prox.soft_threshold(p - 0.2 * g, 0.2 * 0.02), p, g)
    assert theory.gradient_mapping(w, p, objective, 0.2, 0.02) < 1e-8 < start
    assert (p["weight"] == 0).any()


def test_the_potential_is_its_formula():
    w = {"a": torch.randn(3, 2, dtype=torch.float64)}
    problem = Problem(nn.Linear(2, 3, bias=False).double(), cross_entropy, weight_decay=0.5)
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    local, gamma = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    objective = theory.Objective(problem, x, y)
    found = theory.potential({"weight": w["a"]}, [{"weight": local}], [{"weight": gamma}], [objective], 2.0, 0.7)
    gap = w["a"] - local
    expected = (
        cross_entropy(x @ local.T, y)
        + 0.25 * local.square().sum()
        + 0.7 * torch.linalg.svdvals(w["a"]).sum()
        + (gamma * gap).sum()
        + gap.square().sum() / 4
    )
    assert found == pytest.approx(float(expected))


def test_diagnostics_survive_a_resume(tmp_path):
    options = {"clients_per_round": 2, "diagnostics": True, "evaluate_every": 1, "warn": lambda text: None}
    method = fedslr.FedSLR(eta_g=0.5)
    whole = fedslr.run(method, CONVEX, softmax_regression(), rounds=5, **options)
    fedslr.run(method, CONVEX, softmax_regression(), rounds=3, out=tmp_path, **options)
    again = fedslr.run(method, CONVEX, softmax_regression(), rounds=5, out=tmp_path, resume=True, **options)
    assert [r["diagnostics"] for r in again.records] == [r["diagnostics"] for r in whole.records]


def test_other_methods_have_no_diagnostics():
    with pytest.raises(fedslr.FedslrError, match="diagnostics: fedavg has no convergence theory here"):
        fedslr.run(fedslr.FedAvg(), CONVEX, softmax_regression(), rounds=1, diagnostics=True)
