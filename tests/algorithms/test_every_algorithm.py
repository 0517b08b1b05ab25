"""One contract, run over the whole table of methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedslr
from conftest import cohort_of, make_federation, mlp
from fedslr.channel import encoding
from fedslr.core import factored
from fedslr.core.states import plain
from fedslr.data.batches import ShuffledData
from fedslr.engine.eager import Eager
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings

every = pytest.mark.parametrize("method", fedslr.ALGORITHMS.values(), ids=list(fedslr.ALGORITHMS))
SIZES = [5, 11, 3, 8, 7]


def run(method: Any, **changes: Any) -> fedslr.Result:
    options = {"rounds": 4, "clients_per_round": 2, "batch_size": 4, "lr": 0.05, "evaluate_every": 2, **changes}
    return fedslr.run(method(), make_federation(SIZES), model=mlp(), **options)


def models(result: fedslr.Result) -> list[dict[Any, torch.Tensor]]:
    """All that the server shares, which may be several models, and every personal model."""
    shared = dict(factored.leaves_with_paths(result.global_params))
    return [shared, *(result.personal_params(i) for i in range(len(SIZES)))]


def assert_equal(a: fedslr.Result, b: fedslr.Result) -> None:
    for left, right in zip(models(a), models(b), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) for k in left)
    timeless = [[{k: v for k, v in r.items() if not k.startswith("seconds")} for r in x.records] for x in (a, b)]
    assert [{k: v for k, v in r.items() if v is not None} for r in timeless[0]] == [
        {k: v for k, v in r.items() if v is not None} for r in timeless[1]
    ]


@every
def test_is_a_function_of_its_seed(method):
    assert_equal(run(method), run(method))
    assert run(method).records[0]["clients"] != run(method, seed=3).records[0]["clients"]


@every
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_resumed_is_never_stopped(method, store, tmp_path):
    def stop_after(number: int) -> Any:
        rounds = iter(range(number))
        return lambda: next(rounds, None) is None

    with pytest.raises(fedslr.Interrupted, match="stopped after round 3 of 6"):
        run(method, rounds=6, out=tmp_path / "a", store=store, should_stop=stop_after(2))
    resumed = run(method, rounds=6, out=tmp_path / "a", resume=True, store=store)
    assert_equal(resumed, run(method, rounds=6))


@every
@pytest.mark.parametrize("sampled", [1, 5])
def test_cohorts_of_one_and_of_everyone(method, sampled):
    result = run(method, clients_per_round=sampled)
    assert all(len(r["clients"]) == sampled for r in result.records)
    assert all(torch.isfinite(x).all() for model in models(result) for x in model.values())


@every
def test_what_travels_survives_the_wire(method):
    algorithm = method()
    simulation = Simulation(algorithm, make_federation(SIZES), mlp(), Settings(rounds=3, clients_per_round=2))
    for _ in simulation.rounds():
        pass
    held, member = simulation.state.server_state, simulation.state.roster.member(1)
    broadcast = algorithm.broadcast(held.server, held.mean_ledger)
    for sent in (broadcast, *(plain(x) for x in (*held, *member))):
        received = factored.multiply_out(encoding.decode(encoding.encode(sent).data))
        for (path, a), (_, b) in zip(
            factored.leaves_with_paths(factored.multiply_out(sent)), factored.leaves_with_paths(received), strict=True
        ):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


@every
def test_bytes_counted_are_bytes_sent(method, monkeypatch):
    """Encode once more what each sampled client is sent and sends: these are the bytes that were counted."""
    uploads: list[Any] = []
    train = Eager.local_update

    def spy(self: Eager, *args: Any) -> Any:
        made = train(self, *args)
        uploads.append(made[1])
        return made

    monkeypatch.setattr(Eager, "local_update", spy)
    algorithm = method()
    simulation = Simulation(algorithm, make_federation(SIZES), mlp(), Settings(rounds=3, clients_per_round=2))
    for number in range(3):
        uploads.clear()
        sampled = cohort_of(len(SIZES), 2, number)
        held, roster = simulation.state.server_state, simulation.state.roster
        broadcast = algorithm.broadcast(held.server, held.mean_ledger)
        sent = [algorithm.addressed(broadcast, roster.member(c).address, c) for c in sampled]
        record = next(simulation.rounds())
        assert record.clients == sampled
        down, up = ([encoding.encode(tree) for tree in trees if tree] for trees in (sent, uploads))
        assert (record.bytes_down, record.bytes_up) == tuple(sum(len(m.data) for m in ms) for ms in (down, up))
        assert (record.numbers_down, record.numbers_up) == tuple(sum(m.numbers for m in ms) for ms in (down, up))


@every
def test_the_summary_keeps_its_contract(method):
    result = run(method)
    summary = result.summary
    assert summary["algorithm"] == method.name
    assert (summary["dataset"], summary["clients"], summary["rounds"]) == ("arrays", 5, 4)
    assert 0 <= summary["accuracy"]["personal"] <= 1
    assert set(summary["parameters"]) == {"dense", "global", "personal", "personal_std", "shipped"}
    assert summary["parameters"]["dense"] == 83
    assert {"down", "up"} == set(summary["bytes"])
    assert {"train", "aggregate", "evaluate"} <= set(summary["seconds"])
    model = result.personal_model(3)
    x = make_federation(SIZES).clients[3].x_test.float()
    expected = torch.func.functional_call(mlp(), result.personal_params(3), (x,))
    assert torch.equal(model(x), expected)


@every
def test_accuracies_are_those_of_the_models(method):
    """The recorded figures, recomputed from the models the result hands out, client by client."""
    result = run(method)
    last, federation = result.records[-1], make_federation(SIZES)
    for model, params in (("personal", result.personal_params), ("global", lambda i: result.global_params)):
        found = last.get(f"accuracy_{model}_per_client")
        if found is None:
            continue
        for i, client in enumerate(federation.clients):
            out = torch.func.functional_call(mlp(), params(i), (client.x_test.float(),))
            assert found[i] == pytest.approx(float((out.argmax(1) == client.y_test).double().mean()))
        assert last[f"accuracy_{model}"] == pytest.approx(sum(found) / len(found))


@every
def test_every_phase_has_shuffles_of_its_own(method, monkeypatch):
    asked: list[int] = []
    for name in ("epochs", "pairs"):
        real = getattr(ShuffledData, name)

        def spy(self: Any, count: int, phase: int = 0, real: Any = real) -> Any:
            asked.append(phase)
            return real(self, count, phase)

        monkeypatch.setattr(ShuffledData, name, spy)
    run(method, rounds=1, clients_per_round=1, evaluate_every=5, personal_epochs=1)
    training = asked[: -len(SIZES)] if method.name == "perfedavg" else asked
    if method.name == "ifca":
        # IFCA evaluates the loss of every model in one phase; a sum over samples does not depend on their order.
        training = sorted(asked)[: asked.count(0) + 1]
    assert len(training) == len(set(training))


@every
def test_runs_on_digits(method):
    federation = fedslr.load("digits", clients=10, split="dirichlet", alpha=0.1, seed=0)
    result = fedslr.run(method(), federation, rounds=12, clients_per_round=5, evaluate_every=100)
    assert result.summary["accuracy"]["personal"] > 0.25


@pytest.mark.gpu
@every
def test_the_gpu_agrees_with_the_cpu(method):
    a, b = (run(method, device=d, dtype=torch.float64) for d in ("cpu", "cuda"))
    for left, right in zip(models(a), models(b), strict=True):
        assert all((left[k] - right[k].cpu()).abs().max() < 1e-10 for k in left)


@pytest.mark.gpu
@every
def test_resumed_is_never_stopped_on_the_gpu(method, tmp_path: Path):
    test_resumed_is_never_stopped(method, "memory", tmp_path)
