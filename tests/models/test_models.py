from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fedslr
from conftest import make_federation, mlp
from fedslr import models
from fedslr.core import plugins
from fedslr.core.errors import FedslrError
from fedslr.core.problem import Problem
from fedslr.core.types import Batch
from fedslr.engine import preflight
from fedslr.engine.rounds import Simulation
from fedslr.engine.settings import Settings

IMAGES = make_federation([4, 4], (1, 8, 8), classes=4)
TABLE = make_federation([4, 4], (6,), classes=3)


def test_models_by_name_are_drawn_from_the_seed():
    a, b, c = (models.build("cnn", (1, 8, 8), 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.conv1.weight, c.conv1.weight)
    assert preflight.check(a, IMAGES, nn.functional.cross_entropy).warnings == []
    assert sum(p.numel() for p in models.build("cnn", (1, 8, 8), 10, 0).parameters()) == 38_282


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_trains(name):
    federation = fedslr.load("digits", clients=4, samples_per_client=10, seed=0)
    if name == "resnet18":
        federation = make_federation([4, 4], (3, 8, 8), classes=4)
    result = fedslr.run(fedslr.FedSLR(), federation, name, rounds=1, clients_per_round=1)
    assert result.summary["parameters"]["dense"] > 1000


def test_ones_own_model_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def build(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], classes))\n"
        "def wrong(shape, classes):\n    return 3\n"
        "class Wide(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        self.layer = nn.Linear(shape[0], classes)\n"
    )
    (tmp_path / "my_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    result = fedslr.run(fedslr.FedAvg(), TABLE, "my_models:build", rounds=1)
    assert result.summary["parameters"]["dense"] == 21
    for name, says in (
        ("my_models:biuld", r"my_models.py\) has no 'biuld'; did you mean 'build'"),
        ("my_models:wrong", "model: got 3 from my_models:wrong, expected an nn.Module"),
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("my_broken:build", "importing it fails in .*my_broken.py, line 1: ZeroDivisionError"),
    ):
        with pytest.raises(FedslrError, match=says):
            fedslr.run(fedslr.FedAvg(), TABLE, name, rounds=1)
    with pytest.raises(AttributeError, match="cannot assign module") as failed:
        fedslr.run(fedslr.FedAvg(), TABLE, "my_models:Wide", rounds=1)
    assert re.search(r"your code fails in .*my_models.py, line 8: AttributeError", plugins.own_mistake(failed.value))


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    models.build("cnn", (1, 8, 8), 4, 0)
    assert torch.equal(torch.rand(1), expected)


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


class Detached(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x)


class Poisoned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        nn.init.constant_(self.weight, torch.nan)


def spectral() -> nn.Module:
    """Its power iteration is far from its end, since the singular values are close."""
    layer = nn.Linear(6, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3, 6) + 1e-3 * torch.arange(18.0).reshape(3, 6))
    return nn.utils.parametrizations.spectral_norm(layer)


class Idle(nn.Linear):
    """A layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.spare = nn.Linear(2, 2)


def test_unused_parameters_are_told_of():
    assert preflight.check(Idle(), TABLE, nn.functional.cross_entropy).warnings == [
        "model: spare.weight, spare.bias got no gradient and will only decay"
    ]


def test_more_scores_than_classes_are_told_of():
    told = preflight.check(nn.Linear(6, 5), TABLE, nn.functional.cross_entropy)
    assert told.warnings == ["model: it outputs 5 scores for 3 classes"]


def test_peoples_data_stay_as_they_are():
    x = torch.randn(5, 6)
    data = {"x": x, "y": torch.tensor([0, 1, 2, 0, 1]), "x_test": x.clone(), "y_test": torch.tensor([0, 1, 2, 0, 1])}
    before = x.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    federation = fedslr.Federation.from_arrays([data])
    fedslr.run(fedslr.FedSLR(), federation, model=model, rounds=2, diagnostics=True, warn=lambda text: None)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda out, y: out.exp(),
            r"loss: it returns shape \[3, 3\] for 3 samples; expected a value per sample, or the",
        ),
        (lambda out, y: out.nonsense, "cannot be trained with this loss"),
        ("mse", "loss: got 'mse', but task = 'classification' takes cross_entropy; change one of them"),
    ],
)
def test_wrong_losses_are_refused(loss, says):
    with pytest.raises(FedslrError, match=says):
        fedslr.run(fedslr.FedAvg(), TABLE, model=mlp(), rounds=1, loss=loss)


class Mixing(nn.Module):
    """Looks at its whole batch in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out - out.mean(0) if self.training else out


class Elsewhere(nn.Linear):
    """Keeps its weights in a list, where nobody finds them."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.kept = [self.weight, self.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.kept)


class Noisy(nn.Module):
    """Draws numbers whether it trains or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + torch.randn_like(x))


@pytest.mark.parametrize("model", [Noisy(), nn.Sequential(nn.Dropout(), nn.Linear(6, 3))])
def test_models_that_draw_numbers_look_at_one_sample_at_a_time(model):
    assert fedslr.run(fedslr.FedAvg(), TABLE, model=model, rounds=1).summary["rounds"] == 1


def test_a_loss_may_hold_numbers_of_the_runs_own_type():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert fedslr.run(fedslr.FedAvg(), TABLE, model=mlp(), rounds=1, loss=loss, dtype="float64").records


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
            "its buffer '1.running_mean' changes in training.*use GroupNorm",
        ),
        (
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            "its output for a sample depends on the other samples of the batch.*use GroupNorm",
        ),
        (Mixing(), "its output for a sample depends on the other samples"),
        (Elsewhere(), "the loss depends on none of its parameters"),
        (
            nn.Sequential(nn.Linear(5, 3)),
            r"does not take inputs of shape .*; its first layer must fit inputs of shape \[6\]",
        ),
        (nn.Sequential(nn.Linear(6, 2)), r"output for 3 sample.*is \[3, 2\] of torch.float32, expected .* \[3, 3\]"),
        (nn.LazyLinear(3), "parameter 'weight' has no values yet, .* lazy layers by running one input"),
        (nn.Flatten(), "no trainable parameters"),
        (Pair(), "output for 3 sample.*is a tuple"),
        (Squeezed(), r"output for 1 sample.*is \[3\] of torch.float32, expected .* \[1, 3\]: one score per class"),
        (Detached(), "cannot be trained with this loss"),
        (Counting(), "its buffer 'calls' changes in training"),
        (Poisoned(), "parameter 'weight' .* not finite"),
        (spectral(), "changes in training"),
        (nn.Linear, "expected an nn.Module or the name of a model"),
        ("cn", "model.name: got 'cn', no such model; did you mean 'cnn'?"),
        ("cnn", "'cnn' takes images"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, says):
    with pytest.raises(FedslrError, match=says) as refused:
        fedslr.run(fedslr.FedAvg(), TABLE, model=model, rounds=1)
    assert "\n" not in str(refused.value)


def test_a_given_model_is_the_start_and_is_not_touched():
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    result = fedslr.run(fedslr.FedAvg(), TABLE, model=model, rounds=2, lr=1e-9, weight_decay=0, lr_decay=1)
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert torch.allclose(result.global_params[name], old, atol=1e-6)


def test_frozen_parameters_stay():
    model = mlp()
    model[0].weight.requires_grad_(False)
    result = fedslr.run(fedslr.FedAvg(), TABLE, model=model, rounds=2)
    assert "0.weight" not in result.global_params
    assert torch.equal(result.personal_model(0)[0].weight, model[0].weight)


class Tied(nn.Module):
    """The second layer uses the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return out


@pytest.mark.parametrize("model", [mlp(), Tied()])
def test_gradients_are_those_of_backward(model):
    """The problem's parameter swapping gives what autograd gives, for shared weights too."""
    problem = Problem(model, nn.functional.cross_entropy, weight_decay=0.1)
    params = {k: v + 0.1 for k, v in problem.params().items()}
    batch = Batch(torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    found = problem.grad(params, batch)
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(params, strict=False)
    model.zero_grad()
    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad + 0.1 * params[name], atol=1e-6)
    model.load_state_dict(kept)


def test_dropout_is_repeatable():
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def run(noise: int, rate: float = 0.5, **changes: int) -> dict[str, torch.Tensor]:
        made = model()
        made[1].p = rate
        torch.manual_seed(noise)
        options = {"rounds": 3, "seed": 0, **changes}
        return fedslr.run(fedslr.FedAvg(), TABLE, model=made, **options).global_params

    a, b, without = run(1), run(2), run(1, rate=0.0)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["0.weight"], without["0.weight"])


def test_every_client_and_round_has_noise_of_its_own():
    simulation = Simulation(fedslr.FedAvg(), TABLE, mlp(), Settings(rounds=1))
    drawn = []
    for client, number in ((0, 0), (1, 0), (0, 1)):
        with simulation.engine.seeded(client, number):
            drawn.append(float(torch.rand(1)))
    assert len(set(drawn)) == 3
