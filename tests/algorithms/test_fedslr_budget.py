"""FedSLR with a size: ranks and sparsity meet it, in every engine, and a user is warned if they cannot."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedslr
from conftest import make_federation
from fedslr.algorithms.fedslr_budget import choose_ranks, still_rises, stored, threshold_of
from fedslr.core.matrix import full_ranks, is_matrix
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings

SHAPES = [(40, 30), (12, 5, 3, 3), (10, 12), (3, 4), (40,)]


def model() -> nn.Module:
    """A network whose layers are large enough for factors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def params(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {str(i): torch.randn(shape, generator=generator, dtype=torch.float64) for i, shape in enumerate(SHAPES)}


def size(z: dict[str, torch.Tensor], ranks: dict[str, int]) -> int:
    return sum(stored(x, ranks[k]) if is_matrix(x) else x.numel() for k, x in z.items())


def simulate(method: Any, rounds: int, stop: int | None = None, **changes: Any) -> tuple[Simulation, list[Any]]:
    options = {"rounds": rounds, "clients_per_round": 3, "batch_size": 4, "lr": 0.05, "dtype": "float64", **changes}
    simulation = Simulation(method, make_federation([5, 11, 3, 8]), model(), Settings(**options))
    return simulation, list(islice(simulation.rounds(), stop))


# --- the size -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), share=st.floats(0, 1.2))
def test_ranks_spend_the_budget_and_no_more(seed, share):
    z = params(seed)
    budget = share * sum(x.numel() for x in z.values())
    ranks, full = choose_ranks(z, budget), full_ranks(z)
    least = size(z, {k: min(2, most) for k, most in full.items()})
    assert ranks.keys() == full.keys()
    assert all(min(2, full[k]) <= rank <= full[k] for k, rank in ranks.items())
    assert size(z, ranks) <= max(budget, least)
    # No layer could have one direction more.
    more = [stored(z[k], rank + 1) - stored(z[k], rank) for k, rank in ranks.items() if rank < full[k]]
    assert all(size(z, ranks) + extra > budget for extra in more)


def test_directions_with_the_largest_relative_singular_values_are_kept():
    """Two layers of one size: scale does not matter, and the flatter spectrum gets more directions."""
    flat, steep = torch.eye(20), torch.diag(0.5 ** torch.arange(20.0))
    ranks = choose_ranks({"flat": flat, "steep": 1e6 * steep}, 40 * 10)
    assert ranks == {"flat": 8, "steep": 2}


def test_a_layer_whose_factors_are_no_smaller_stays_dense():
    z = {"small": torch.eye(4), "large": torch.eye(30)}
    assert choose_ranks(z, 16 + 5 * 60) == {"small": 4, "large": 5}
    assert choose_ranks(z, 1e9) == {"small": 4, "large": 30}


@pytest.mark.parametrize("target", [0.4, 0.6])
@pytest.mark.parametrize("engine", ["eager", "batched"])
def test_personal_models_have_the_size_that_was_asked_for(engine, target):
    simulation, records = simulate(fedslr.FedSLRBudget(eta_g=2, target_size=target), 8, engine=engine)
    sizes = simulation.sizes()
    most = max(m + n for m, n in [(40, 6), (40, 40), (3, 40)])
    assert target * sizes.dense - most - 2 < max(sizes.personal) <= target * sizes.dense
    for number in range(4):
        own = simulation.state.roster.member(number).client.p
        assert sum(int(x.count_nonzero()) for x in own.values()) <= target / 3 * sizes.dense
    assert records[4].parameters_global == sizes.dense


def test_as_many_entries_exceed_the_threshold_as_were_asked_for():
    x = params(0)
    entries = torch.cat([leaf.abs().flatten() for leaf in x.values()])
    for count in (0, 1, 100, len(entries) - 1):
        assert int((entries > threshold_of(x, count)).sum()) == count


# --- the cut --------------------------------------------------------------------------------------------------------


def test_ranks_are_chosen_once_and_stay():
    simulation, records = simulate(fedslr.FedSLRBudget(eta_g=2), 10)
    assert [bool(record.rank) for record in records] == [False] * 6 + [True] * 4
    chosen = {k: int(rank) for k, rank in simulation.state.server_state.server.ranks.items()}
    assert all(record.rank.items() <= chosen.items() for record in records[6:])


@pytest.mark.parametrize(("rounds", "cut_at"), [(1, 0.7), (3, 1.0), (4, 0.01)])
def test_the_last_model_is_always_low_rank(rounds, cut_at):
    assert simulate(fedslr.FedSLRBudget(cut_at=cut_at), rounds)[1][-1].rank


def test_until_the_cut_the_global_model_is_feddyns():
    ours, _ = simulate(fedslr.FedSLRBudget(eta_g=4, cut_at=1.0), 8, stop=7)
    theirs, _ = simulate(fedslr.FedDyn(alpha=0.25), 8, stop=7)
    shared = theirs.state.global_model()
    assert all(torch.allclose(x, shared[k], atol=1e-12) for k, x in ours.state.global_model().items())
    assert ours.state.server_state.server.ranks == {}


# --- warnings -------------------------------------------------------------------------------------------------------


def warnings_of(method: fedslr.FedSLRBudget) -> list[str]:
    told: list[str] = []
    options = {"rounds": 40, "clients_per_round": 2, "lr": 0.05, "evaluate_every": 1}
    fedslr.run(method, make_federation([5, 8, 6]), model(), warn=told.append, **options)
    return told


def test_a_size_that_cannot_be_met_is_reported_once():
    assert warnings_of(fedslr.FedSLRBudget(target_size=0.05)) == [
        "round 28: one-dimensional parameters and rank 2 in every layer take more than the global part's share of "
        "target_size; raise target_size"
    ]
    assert not [text for text in warnings_of(fedslr.FedSLRBudget(target_size=0.4)) if "target_size" in text]


def test_accuracy_that_rises_until_the_cut_is_reported():
    level, rising = [(n, 0.9) for n in range(5, 71, 5)], [(n, n / 100) for n in range(5, 71, 5)]
    assert still_rises(rising, 70)
    assert not still_rises(level, 70)
    assert not still_rises(rising[:10], 70)  # no evaluation in the last quarter
    after = [(n, 1.0) for n in range(70, 101, 5)]
    assert not still_rises(level[:-1] + after, 70)
