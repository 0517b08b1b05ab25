"""Optimizers of the server: the mean update Δ of a round is a descent direction, and its negative a gradient.

FedAdam, FedYogi and FedAdagrad: Reddi et al., Adaptive Federated Optimization (ICLR 2021).
FedAvgM: Hsu et al., Measuring the Effects of Non-Identical Data Distribution (2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedslr.core import tree
from fedslr.core.schema import below_one, positive
from fedslr.core.tree import Tree


class ServerStep(NamedTuple):
    """The update that the server adds to its model in place of Δ, and the moments that it keeps for the next round."""

    update: Tree
    moments: Tree


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """A rule that turns the mean update Δ of a round into the server's step. Moments are `{}` before the first."""

    name: ClassVar[str]

    @abstractmethod
    def step(self, mean: Tree, moments: Tree) -> ServerStep:
        """Return the server's step and the next moments."""


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """FedAvgM: m ← β₁m + Δ, w ← w + ηm."""

    name: ClassVar[str] = "momentum"

    lr: Annotated[float, positive, "step size η of the server"] = 1.0
    beta1: Annotated[float, below_one, "factor β₁ of the earlier updates"] = 0.9

    def step(self, mean: Tree, moments: Tree) -> ServerStep:
        m = tree.map(lambda m, d: self.beta1 * m + d, moments.get("m") or tree.zeros(mean), mean)
        return ServerStep(tree.map(lambda m: self.lr * m, m), {"m": m})


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """m ← β₁m + (1 − β₁)Δ, w ← w + η·m/(√v + τ), with v = τ² before the first round. `square` has the rule of v."""

    lr: Annotated[float, positive, "step size η of the server"] = 0.03
    beta1: Annotated[float, below_one, "factor β₁ of the earlier updates"] = 0.9
    tau: Annotated[float, positive, "number τ that is added to the divisor: the degree of adaptivity"] = 1e-3

    @abstractmethod
    def square(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next v, given Δ²."""

    def step(self, mean: Tree, moments: Tree) -> ServerStep:
        last = moments or {"m": tree.zeros(mean), "v": tree.map(lambda d: torch.full_like(d, self.tau**2), mean)}
        m = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, last["m"], mean)
        v = tree.map(lambda v, d: self.square(v, d * d), last["v"], mean)
        return ServerStep(tree.map(lambda m, v: self.lr * m / (v.sqrt() + self.tau), m, v), {"m": m, "v": v})


@dataclass(frozen=True)
class Adam(Adaptive):
    """FedAdam: v ← β₂v + (1 − β₂)Δ²."""

    name: ClassVar[str] = "adam"

    beta2: Annotated[float, below_one, "factor β₂ of the earlier squared updates"] = 0.99

    def square(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: v ← v − (1 − β₂)Δ²·sign(v − Δ²)."""

    name: ClassVar[str] = "yogi"

    def square(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """FedAdagrad: v ← v + Δ²."""

    name: ClassVar[str] = "adagrad"

    beta1: Annotated[float, below_one, "factor β₁ of the earlier updates"] = 0.0

    def square(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


SERVER_OPTIMIZERS: dict[str, type[ServerOptimizer]] = {cls.name: cls for cls in (Momentum, Adam, Yogi, Adagrad)}
