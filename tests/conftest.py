"""Small federations and models that every test can afford."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedslr
from fedslr.engine import selection

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def make_arrays(sizes: list[int], shape: tuple[int, ...], classes: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Clients with different numbers of samples, whose classes have different means."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, *shape))
    clients = []
    for size in sizes:
        y, y_test = rng.integers(0, classes, size), rng.integers(0, classes, 7)
        clients.append(
            {
                "x": centres[y] + rng.normal(size=(size, *shape)),
                "y": y,
                "x_test": centres[y_test] + rng.normal(size=(7, *shape)),
                "y_test": y_test,
            }
        )
    return clients


def make_federation(sizes: list[int], shape: tuple[int, ...] = (6,), classes: int = 3) -> fedslr.Federation:
    return fedslr.Federation.from_arrays(make_arrays(sizes, shape, classes), num_classes=classes)


def mlp(inputs: int = 6, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))


def small_cnn(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 3, (3, 2)),
        nn.Flatten(),
        nn.LazyLinear(classes),
    )


def cohort_of(clients: int, size: int, round: int) -> list[int]:
    """The clients that are sampled uniformly in a round of a run with seed 0."""
    return selection.draw(selection.uniform, size, [1] * clients, 0, round)


def assert_alike(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    """Compare nested lists and dictionaries; floating-point numbers may differ by rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_alike(value, b[key], tolerance)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_alike(one, other, tolerance)
    else:
        assert a == (pytest.approx(b, abs=tolerance, rel=tolerance) if isinstance(b, float) else b)


@pytest.fixture
def ragged() -> fedslr.Federation:
    """Five clients that hold 3 to 11 samples of 6 features."""
    return make_federation([5, 11, 3, 8, 7])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process: its exit code and what it printed."""
    from fedslr.cli.main import main

    def call(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedslr", *map(str, args)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
