"""Optimizers of local steps: how a gradient moves the parameters.

Every optimizer computes what the class of the same name in `torch.optim` computes. Its state is a tree of tensors, so
that engines can stack and record it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedslr.core import tree
from fedslr.core.schema import below_one, positive
from fedslr.core.types import Params

CLIP_EPSILON = 1e-6
"""The number that torch.nn.utils.clip_grad_norm_ adds to a norm before it divides by it."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """A rule that moves the parameters v along a gradient g with a step size η."""

    name: ClassVar[str]
    decouples_decay: ClassVar[bool] = False
    """Whether the weight decay shrinks v by itself, v ← v − η·wd·v, and is not part of the gradient."""

    def init(self, v: Params) -> tree.Tree:
        """Return the state before the first step."""
        return {}

    @abstractmethod
    def step(self, v: Params, g: Params, state: tree.Tree, lr: Any) -> tuple[Params, tree.Tree]:
        """Return the next parameters and the next state."""


@dataclass(frozen=True)
class SGD(Optimizer):
    """v ← v − ηg."""

    name: ClassVar[str] = "sgd"

    def step(self, v: Params, g: Params, state: tree.Tree, lr: Any) -> tuple[Params, tree.Tree]:
        return tree.map(lambda v, g: v - lr * g, v, g), state


@dataclass(frozen=True)
class Momentum(Optimizer):
    """m ← βm + g, v ← v − ηm."""

    name: ClassVar[str] = "momentum"

    momentum: Annotated[float, below_one, "factor β of the earlier gradients"] = 0.9

    def init(self, v: Params) -> tree.Tree:
        return {"m": tree.zeros(v)}

    def step(self, v: Params, g: Params, state: tree.Tree, lr: Any) -> tuple[Params, tree.Tree]:
        m = tree.map(lambda m, g: self.momentum * m + g, state["m"], g)
        return tree.map(lambda v, m: v - lr * m, v, m), {"m": m}


@dataclass(frozen=True)
class Nesterov(Momentum):
    """m ← βm + g, v ← v − η(g + βm)."""

    name: ClassVar[str] = "nesterov"

    def step(self, v: Params, g: Params, state: tree.Tree, lr: Any) -> tuple[Params, tree.Tree]:
        m = tree.map(lambda m, g: self.momentum * m + g, state["m"], g)
        return tree.map(lambda v, g, m: v - lr * (g + self.momentum * m), v, g, m), {"m": m}


@dataclass(frozen=True)
class Adam(Optimizer):
    """m ← β₁m + (1 − β₁)g, s ← β₂s + (1 − β₂)g², v ← v − η·m̂/(√ŝ + ε), m̂ = m/(1 − β₁ᵗ), ŝ = s/(1 − β₂ᵗ)."""

    name: ClassVar[str] = "adam"

    beta1: Annotated[float, below_one, "factor β₁ of the earlier gradients"] = 0.9
    beta2: Annotated[float, below_one, "factor β₂ of the earlier squared gradients"] = 0.999
    eps: Annotated[float, positive, "number ε that is added to the divisor"] = 1e-8

    def init(self, v: Params) -> tree.Tree:
        steps = torch.zeros((), dtype=torch.float64, device=next(iter(v.values())).device)
        return {"m": tree.zeros(v), "s": tree.zeros(v), "steps": steps}

    def step(self, v: Params, g: Params, state: tree.Tree, lr: Any) -> tuple[Params, tree.Tree]:
        steps = state["steps"] + 1
        m = tree.map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, state["m"], g)
        s = tree.map(lambda s, g: self.beta2 * s + (1 - self.beta2) * (g * g), state["s"], g)
        # Clients may have taken different numbers of steps, and a fused map reads a client's own numbers from trees.
        first, second = (tree.fill(1 - beta**steps, v) for beta in (self.beta1, self.beta2))
        v = tree.map(lambda v, m, s, a, b: v - lr * (m / a) / ((s / b).sqrt() + self.eps), v, m, s, first, second)
        return v, {"m": m, "s": s, "steps": steps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    name: ClassVar[str] = "adamw"
    decouples_decay: ClassVar[bool] = True


OPTIMIZERS: dict[str, type[Optimizer]] = {cls.name: cls for cls in (SGD, Momentum, Nesterov, Adam, AdamW)}


def clip(g: Params, bound: float) -> Params:
    """Return g·min(1, bound/‖g‖), with the norm over all parameters."""
    scale: Tensor = (bound / (tree.norm(g) + CLIP_EPSILON)).clamp(max=1)
    return tree.map(torch.mul, g, tree.fill(scale, g))


class LocalSteps(NamedTuple):
    """How a client's gradients become steps."""

    optimizer: Optimizer
    grad_clip: float = 0.0
    """The largest norm of a gradient; 0 for no limit."""

    @property
    def is_plain(self) -> bool:
        """Whether a step is v ← v − ηg."""
        return isinstance(self.optimizer, SGD) and not self.grad_clip


PLAIN_SGD = LocalSteps(SGD())
"""v ← v − ηg."""
