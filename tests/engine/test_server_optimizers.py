"""Optimizers of the server against a transcription of Algorithm 2 of Reddi et al. (2021), and resumption with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedslr
from conftest import make_federation, mlp
from fedslr.core.server_optimizers import SERVER_OPTIMIZERS
from fedslr.storage.checkpoint import Checkpoints

SIZES = [5, 11, 3, 8, 7]
OPTIONS: dict[str, dict[str, float]] = {
    "momentum": {"lr": 0.7, "beta1": 0.6},
    "adam": {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 1e-2},
    "yogi": {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 1e-2},
    "adagrad": {"lr": 0.05, "beta1": 0.3, "tau": 1e-2},
}
every = pytest.mark.parametrize("name", SERVER_OPTIMIZERS)


def run(name: str | None, method: Any = fedslr.FedAvg, rounds: int = 6, model: Any = None, **changes: Any) -> Any:
    optimizer = {} if name is None else {"server_optimizer": {"name": name, **OPTIONS[name]}}
    options = {"clients_per_round": 3, "batch_size": 4, "lr": 0.05, "dtype": "float64", **optimizer, **changes}
    return fedslr.run(method(), make_federation(SIZES), model or mlp(), rounds=rounds, **options)


def transcription(name: str, updates: list[Tensor], lr: float, beta1: float, beta2: float = 0, tau: float = 0) -> Any:
    """Return the server's steps for the mean updates Δ_t of some rounds."""
    m, v, steps = torch.zeros_like(updates[0]), torch.full_like(updates[0], tau**2), []
    for delta in updates:
        if name == "momentum":
            m = beta1 * m + delta
            steps.append(lr * m)
            continue
        m = beta1 * m + (1 - beta1) * delta
        v = {
            "adagrad": v + delta**2,
            "yogi": v - (1 - beta2) * delta**2 * torch.sign(v - delta**2),
            "adam": beta2 * v + (1 - beta2) * delta**2,
        }[name]
        steps.append(lr * m / (torch.sqrt(v) + tau))
    return steps


@every
def test_the_steps_are_those_of_the_paper(name: str) -> None:
    torch.manual_seed(0)
    updates = [torch.randn(4, 3, dtype=torch.float64) * 0.1 for _ in range(6)]
    optimizer, moments, found = SERVER_OPTIMIZERS[name](**OPTIONS[name]), {}, []
    for delta in updates:
        step, moments = optimizer.step({"w": delta}, moments)
        found.append(step["w"])
    for a, b in zip(found, transcription(name, updates, **OPTIONS[name]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@every
def test_a_federation_moves_by_these_steps(name: str) -> None:
    """The mean update of a round is a round of FedAvg from the model before; it does not depend on the server."""
    model, updates, found = mlp().double(), [], [dict(mlp().double().named_parameters())]
    for rounds in range(1, 4):
        plain = run(None, rounds=1, model=model, clients_per_round=5, epochs=1, batch_size=1000, schedule="constant")
        updates.append({k: plain.global_params[k] - p.detach() for k, p in model.named_parameters()})
        found.append(
            run(name, rounds=rounds, clients_per_round=5, epochs=1, batch_size=1000, schedule="constant").global_params
        )
        model.load_state_dict(found[-1])
    for key, start in found[0].items():
        steps = transcription(name, [update[key] for update in updates], **OPTIONS[name])
        torch.testing.assert_close(found[-1][key], start.detach() + sum(steps), rtol=0, atol=1e-10)


def test_momentum_without_memory_is_the_plain_mean() -> None:
    plain, moved = run(None), run("momentum", server_optimizer={"name": "momentum", "lr": 1, "beta1": 0})
    assert all(torch.equal(x, moved.global_params[k]) for k, x in plain.global_params.items())


@every
@pytest.mark.parametrize("engine", ["eager", "batched"])
def test_resumed_is_never_stopped(name: str, engine: str, tmp_path: Path) -> None:
    stops = iter([False, True])
    with pytest.raises(fedslr.Interrupted):
        run(name, out=tmp_path, engine=engine, should_stop=lambda: next(stops))
    resumed, whole = run(name, out=tmp_path, engine=engine, resume=True), run(name, engine=engine)
    assert all(torch.equal(x, resumed.global_params[k]) for k, x in whole.global_params.items())
    opened = fedslr.open_run(tmp_path, make_federation(SIZES), mlp())
    assert all(torch.equal(x, opened.global_params[k]) for k, x in whole.global_params.items())


@pytest.mark.parametrize(
    "method", [m for m in fedslr.ALGORITHMS.values() if m.averages()], ids=lambda method: str(method.name)
)
def test_methods_that_average_take_one(method: Any) -> None:
    result = run("adam", method, rounds=2)
    assert all(torch.isfinite(x).all() for x in result.personal_params(1).values())


def test_methods_with_a_server_of_their_own_refuse_one() -> None:
    refusing = {name for name, method in fedslr.ALGORITHMS.items() if not method.averages()}
    assert refusing == {
        *("fedslr", "fedslr-budget", "feddyn", "scaffold", "pfedme", "fedamp", "ifca", "local"),
        *("lpgd", "gpgd", "sparse-sparse", "sparse-lowrank", "lowrank-lowrank"),
    }
    for name in refusing:
        with pytest.raises(fedslr.FedslrError, match=f"server_optimizer: got 'yogi', but the server of {name} does"):
            run("yogi", fedslr.ALGORITHMS[name])


def test_a_checkpoint_without_moments_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of earlier versions have none."""
    save = Checkpoints.save

    def save_as_before(self: Any, rounds: int, server: Any, *rest: Any) -> None:
        save(self, rounds, {k: v for k, v in server.items() if k != "moments"}, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_as_before)
        run(None, rounds=2, out=tmp_path)
    resumed, whole = run(None, rounds=4, out=tmp_path, resume=True), run(None, rounds=4)
    assert all(torch.equal(x, resumed.global_params[k]) for k, x in whole.global_params.items())
