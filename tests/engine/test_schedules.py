"""Schedules against torch.optim.lr_scheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fedslr
from conftest import make_federation, mlp
from fedslr.engine.settings import Settings
from fedslr.run.recipes import build_settings

LR, ROUNDS = 0.2, 17


def step_sizes(**options: Any) -> list[float]:
    settings = build_settings({"rounds": ROUNDS, "lr": LR, **options})
    return [settings.round(number).lr for number in range(ROUNDS)]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=LR)


def steps_of(scheduler: Any) -> list[float]:
    """Return the step sizes that a scheduler gives."""
    found = []
    for _ in range(ROUNDS):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def assert_close(found: list[float], wanted: list[float]) -> None:
    assert found == pytest.approx(wanted, rel=0, abs=1e-10)


def test_exponential() -> None:
    assert_close(step_sizes(lr_decay=0.93), steps_of(lr_scheduler.ExponentialLR(optimizer(), 0.93)))


def test_exponential_is_the_default_and_what_it_always_was() -> None:
    settings = Settings(lr=LR, lr_decay=0.93)
    for number in (0, 1, 40):
        now = settings.round(number)
        assert (now.lr, now.decay) == (LR * 0.93**number, 0.93**number)


def test_constant() -> None:
    assert step_sizes(schedule="constant") == [LR] * ROUNDS


def test_step() -> None:
    wanted = steps_of(lr_scheduler.StepLR(optimizer(), 5, 0.3))
    assert_close(step_sizes(schedule={"name": "step", "period": 5, "factor": 0.3}), wanted)


def test_cosine_ends_at_its_least_step_size() -> None:
    wanted = steps_of(lr_scheduler.CosineAnnealingLR(optimizer(), ROUNDS - 1, 0.03))
    found = step_sizes(schedule={"name": "cosine", "lr_min": 0.03})
    assert_close(found, wanted)
    assert found[-1] == pytest.approx(0.03)
    assert step_sizes(schedule="cosine")[-1] == pytest.approx(LR / 100)


@pytest.mark.parametrize(
    ("schedule", "rest"),
    [
        ({"name": "exponential"}, lambda made: lr_scheduler.ExponentialLR(made, 0.998)),
        ({"name": "cosine", "lr_min": 0.01}, lambda made: lr_scheduler.CosineAnnealingLR(made, ROUNDS - 5, 0.01)),
        ({"name": "step", "period": 4}, lambda made: lr_scheduler.StepLR(made, 4)),
    ],
    ids=["exponential", "cosine", "step"],
)
def test_a_linear_warm_up_precedes_the_schedule(schedule: dict[str, Any], rest: Any) -> None:
    """The first of 4 rounds has a quarter of the step size; the round after them has all of it."""
    made = optimizer()
    rising = lr_scheduler.LinearLR(made, start_factor=1 / 4, total_iters=3)
    wanted = steps_of(lr_scheduler.SequentialLR(made, [rising, rest(made)], [4]))
    assert_close(step_sizes(schedule={**schedule, "warmup": 4}), wanted)


def test_other_step_sizes_follow_the_schedule() -> None:
    settings = build_settings({"rounds": 9, "lr": LR, "schedule": {"name": "cosine", "warmup": 2}, "personal_lr": 0.05})
    for number in range(9):
        now = settings.round(number)
        assert now.lr == pytest.approx(LR * now.decay)
        assert now.in_personal_phase().lr == pytest.approx(0.05 * now.decay)


def test_a_run_with_a_cosine_cannot_be_made_longer(tmp_path: Any) -> None:
    def run(rounds: int, **options: Any) -> Any:
        return fedslr.run(
            fedslr.FedAvg(), make_federation([5, 6]), mlp(), out=tmp_path, rounds=rounds, schedule="cosine", **options
        )

    run(2)
    with pytest.raises(
        fedslr.FedslrError, match="rounds was 2, now 3; rounds of schedule 'cosine' depend on it from the first on"
    ):
        run(3, resume=True)
