"""Optimizers, clipping and numbers of steps in every engine; clients hold different numbers of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fedslr
from conftest import make_federation, mlp
from fedslr.core import tree
from fedslr.core.optimizers import OPTIMIZERS
from fedslr.core.types import Steps
from fedslr.data.batches import ShuffledData
from fedslr.engine import fused_map
from fedslr.engine.batched import Batched, round_tensors, stack_trees
from fedslr.engine.cuda import Cuda
from fedslr.engine.eager import Eager
from fedslr.engine.roster import Cohort
from fedslr.engine.rounds import Simulation
from fedslr.run.recipes import build_settings

ALIKE, RAGGED = [7, 7, 7, 7, 7], [5, 11, 3, 8, 7]
sizes = pytest.mark.parametrize("sizes", [ALIKE, RAGGED], ids=["alike", "ragged"])
SGD_IN_PHASE_TWO = {"optimizer": "sgd", "grad_clip": 0}
CASES = [
    *(("fedavg", {"optimizer": name, "grad_clip": clip}) for name in OPTIMIZERS for clip in (0, 0.5)),
    *(("ditto", {"optimizer": name, "personal": {"lr": 0.02, "optimizer": "adam"}}) for name in ("nesterov", "adamw")),
    *(("fedslr", {"optimizer": name, "grad_clip": 1, "personal": SGD_IN_PHASE_TWO}) for name in OPTIMIZERS),
    *((name, {"optimizer": "adam"}) for name in ("feddyn", "fedspa", "fedrep", "fedamp", "ifca", "local")),
    *((name, {"local_steps": 4, "personal_steps": 2}) for name in fedslr.ALGORITHMS),
]
TOGETHER = [case for case in CASES if case[0] not in ("lpgd", "sparse-lowrank", "lowrank-lowrank")]


def ids(cases: list[Any]) -> list[str]:
    return [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}"[:60] for name, options in cases]


def simulation(name: str, sizes: list[int], engine: str, **options: Any) -> Simulation:
    given = {"rounds": 3, "clients_per_round": 4, "batch_size": 4, "lr": 0.05, "dtype": "float64", "device": "cpu"}
    settings = build_settings({**given, "engine": engine, **options})
    return Simulation(fedslr.ALGORITHMS[name](), make_federation(sizes), mlp(), settings)


def assert_close(a: Any, b: Any) -> None:
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def states(run: Simulation) -> Any:
    for _ in run.rounds():
        pass
    return tuple(run.state.server_state), [tuple(run.state.roster.member(c)) for c in range(run.num_clients)]


@sizes
@pytest.mark.parametrize(("name", "options"), TOGETHER, ids=ids(TOGETHER))
def test_clients_train_together_as_one_by_one(name: str, options: dict[str, Any], sizes: list[int]) -> None:
    together = simulation(name, sizes, "batched", **options)
    assert isinstance(together.engine, Batched)
    assert_close(states(together), states(simulation(name, sizes, "eager", **options)))
    assert not together.engine.one_by_one


@sizes
@pytest.mark.parametrize(("name", "options"), TOGETHER, ids=ids(TOGETHER))
def test_the_cuda_engine_does_the_same_work(
    name: str, options: dict[str, Any], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without recording it: step sizes are tensors, and maps and gradients are fused."""
    monkeypatch.setattr(fused_map, "compiled", lambda: fused_map.apply_to_leaves)
    run = simulation(name, sizes, "eager", **options)
    eager, now, cohort = run.engine, run.settings.round(1), [0, 2, 3]
    assert isinstance(eager, Eager)
    ours = Cuda(eager.work)
    participants = list(Cohort(cohort, run.state.roster, payload_of=run.state.delivery.decoded))
    with tree.mapped_by(fused_map.fuse):
        batches = ours._load_batches(cohort, now.number)
        sent = stack_trees([one.payload for one in participants])
        held = stack_trees([(one.member.client, one.member.ledger) for one in participants])
        made = ours._run(batches, held, sent, False, now._replace(**round_tensors(now, ours.device)))
    for slot, wanted in enumerate(eager.train(participants, now)):
        assert_close(made.upload_of(slot), wanted.upload_of(0))
        booked = [one.booked(run.algorithm, [1.0] * len(one.numbers), now) for one in (made, wanted)]
        assert_close(tuple(booked[0][slot]), tuple(booked[1][0]))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "sgd"])
def test_every_element_of_a_step_is_fused(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No map of a step closes over a client's own numbers, so that a GPU compiles it to one kernel per tensor."""
    fused: list[bool] = []

    def spy(fn: Any, trees: Any) -> Any:
        own = any(torch._C._functorch.is_batchedtensor(x) for x in fused_map._closed_over(fn))
        fused.append(not own)
        return fused_map.fuse(fn, trees)

    monkeypatch.setattr(fused_map, "compiled", lambda: fused_map.apply_to_leaves)
    run = simulation("fedavg", RAGGED, "batched", optimizer=optimizer, grad_clip=0.1, rounds=1)
    with tree.mapped_by(spy):
        states(run)
    assert fused
    assert all(fused)


# --- a number of steps ------------------------------------------------------------------------------------------------


def data(samples: int = 11, batch_size: int = 4) -> ShuffledData:
    x = torch.arange(samples, dtype=torch.float32)[:, None]
    return ShuffledData(x, torch.arange(samples), batch_size=batch_size, seed=0, round=2, client=1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 10])
def test_steps_are_the_first_batches_of_the_epochs(count: int) -> None:
    held = data()
    labels = [batch.y.tolist() for batch in held.epochs(4)][:count]
    assert [batch.y.tolist() for batch in held.epochs(Steps(count))] == labels
    pairs = [(a.y.tolist(), b.y.tolist()) for a, b in held.pairs(4)][:count]
    assert [(a.y.tolist(), b.y.tolist()) for a, b in held.pairs(Steps(count))] == pairs
    assert held.steps(Steps(count)) == count


def test_as_many_steps_as_the_epochs_have_are_the_epochs() -> None:
    """Clients of 7 samples have two batches of up to 4."""
    epochs = simulation("fedslr", ALIKE, "eager", epochs=3, personal_epochs=2)
    steps = simulation("fedslr", ALIKE, "eager", local_steps=6, personal_steps=4)
    assert_close(states(epochs), states(steps))


def test_a_number_of_steps_makes_the_work_of_clients_alike() -> None:
    uneven = [400, 3, 3, 3, 3]
    assert not isinstance(simulation("fedavg", uneven, "auto").engine, Batched)
    assert isinstance(simulation("fedavg", uneven, "auto", local_steps=4).engine, Batched)


def test_the_personal_phase_has_a_step_size_of_its_own() -> None:
    """FedSLR's phase II with half the step size: as if all of the run had it, except for the uploads."""
    small, whole = (simulation("fedslr", ALIKE, "eager", rounds=1, lr=lr) for lr in (0.05, 0.1))
    mixed = simulation("fedslr", ALIKE, "eager", rounds=1, lr=0.1, personal={"lr": 0.05})
    for run in (small, whole, mixed):
        states(run)
    for client in range(5):
        assert_close(mixed.state.roster.member(client).client, small.state.roster.member(client).client)
    assert_close(mixed.state.server_state, whole.state.server_state)
