"""Models of many clients at once say and learn what each client's own model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedslr.engine import stacked
from fedslr.models.networks import CNN, Block, ResNet18

CLIENTS, SAMPLES = 3, 4


class Pooled(nn.Module):
    """A stem with a pool, blocks with and without a projection, a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 7, 2, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 3, 2, padding=1)
        out: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return out


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 7), nn.Tanh(), nn.Linear(7, 5))


def kernels() -> nn.Module:
    """Kernels that are not square, norms nobody adds to, activations of several kinds."""
    return nn.Sequential(
        nn.Conv2d(3, 4, (3, 2), bias=False), nn.SiLU(), nn.GroupNorm(4, 4), nn.Conv2d(4, 6, 1, 2), nn.Sigmoid(),
        nn.Identity(), nn.Flatten(), nn.Linear(6 * 7 * 8, 5),
    )  # fmt: skip


MODELS = {
    "cnn": lambda: CNN((3, 16, 16), 5),
    "pooled": Pooled,
    "flat": flat,
    "kernels": kernels,
    "resnet18": lambda: ResNet18((3, 16, 16), 5),
}


def own_models(model: nn.Module) -> dict[str, Tensor]:
    """Every client's own weights, all different."""
    return {
        name: torch.stack([p.detach() + 0.05 * torch.randn_like(p) for _ in range(CLIENTS)])
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_each_clients_own(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    network = stacked.stack_model(model, rounded=False)
    assert network is not None
    params = {k: p.requires_grad_() for k, p in own_models(model).items()}
    x, y = torch.randn(CLIENTS, SAMPLES, 3, 16, 16, dtype=torch.float64), torch.randint(0, 5, (CLIENTS, SAMPLES))
    outputs = network(params, x)
    loss = cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum") / SAMPLES
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    for client in range(CLIENTS):
        mine = {k: p[client].detach().requires_grad_() for k, p in params.items()}
        alone = functional_call(model, mine, (x[client],))
        torch.testing.assert_close(outputs[client], alone, rtol=1e-10, atol=1e-12)
        own = torch.autograd.grad(cross_entropy(alone, y[client]), list(mine.values()))
        for (k, stacked_grad), g in zip(grads.items(), own, strict=True):
            torch.testing.assert_close(stacked_grad[client], g, rtol=1e-8, atol=1e-12, msg=k)


def test_norms_take_the_sum_and_the_relu_behind_them_along() -> None:
    network: Any = stacked.stack_model(ResNet18((3, 16, 16), 5), rounded=False)
    called = [node.target for node in network.graph.nodes if node.op == "call_function"]
    assert torch.relu not in called
    assert torch.add not in called


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(3, 4, 3, stride=(1, 2)),
        nn.GroupNorm(2, 4, affine=False),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5)),
        nn.MultiheadAttention(4, 2),
        Branching(),
    ],
)
def test_other_layers_are_left_to_others(model: nn.Module) -> None:
    assert stacked.stack_model(model, rounded=False) is None


def test_layers_that_share_weights_are_left_to_others() -> None:
    """Gradients of weights are computed aside, where nobody adds them up."""
    one = nn.Conv2d(3, 3, 3, padding=1)
    assert stacked.stack_model(nn.Sequential(one, one), rounded=False) is None
    other = nn.Conv2d(3, 3, 3, padding=1)
    other.weight = one.weight
    assert stacked.stack_model(nn.Sequential(one, other), rounded=False) is None


class Odd(nn.Module):
    """A convolution that is used in some way of its own."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.conv, self.use = nn.Conv2d(3, 3, 3, padding=1), use

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.use(self, x)
        return out


class Optional(Odd):
    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        return super().forward(x)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "model",
    [
        Odd(lambda m, x: m.conv(x) if m.training else m.conv(2 * x)),
        Odd(lambda m, x: m.conv(x).reshape(len(x), -1)),
        Odd(lambda m, x: m.conv(input=x)),
        Odd(lambda m, x: torch.add(m.conv(x), x, alpha=2)),
        Optional(lambda m, x: m.conv(x)),
        frozen(),
    ],
    ids=["otherwise in training", "length", "by keyword", "alpha", "optional input", "frozen"],
)
def test_models_of_other_ways_are_left_to_others(model: nn.Module) -> None:
    model.eval()
    assert stacked.stack_model(model, rounded=False) is None
    assert not model.training


def test_another_answer_is_noticed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    network = stacked.stack_model(model, rounded=False)
    assert network is not None
    x = torch.randn(2, 3, 2, 2)
    assert stacked.gives_same_outputs(network, model, x)
    assert not stacked.gives_same_outputs(lambda params, x: 1.05 * network(params, x), model, x)


def test_a_norm_that_is_looked_at_twice_is_not_fused_away() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return (torch.relu(y) + y).mean((2, 3))

    model = Twice().double()
    network = stacked.stack_model(model, rounded=False)
    assert network is not None
    x = torch.randn(CLIENTS, SAMPLES, 3, 4, 4, dtype=torch.float64)
    params = own_models(model)
    for client in range(CLIENTS):
        alone = functional_call(model, {k: p[client] for k, p in params.items()}, (x[client],))
        torch.testing.assert_close(network(params, x)[client], alone)


def test_a_layer_used_in_a_way_no_rule_foresees_is_noticed() -> None:
    """A linear layer over the width of an image: channels come last in a stacked model."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    network = stacked.stack_model(model, rounded=False)
    assert network is not None
    assert not stacked.gives_same_outputs(network, model, torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("name", MODELS)
def test_right_ones_are_recognized(name: str) -> None:
    model = MODELS[name]()
    network = stacked.stack_model(model, rounded=False)
    assert network is not None
    assert stacked.gives_same_outputs(network, model, torch.randn(2, 3, 16, 16))
