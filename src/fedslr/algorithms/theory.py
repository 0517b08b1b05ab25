"""The quantities of the paper's convergence theory, to be watched while a run goes on.

With weight decay every f_i here includes wd/2·‖·‖², as the algorithm's gradients do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedslr.algorithms.fedslr import Client, FedSLR, Server
from fedslr.core import tree
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.matrix import LowRank, dense, is_matrix, to_matrix
from fedslr.core.problem import Task
from fedslr.core.prox import nuclear_norm, soft_threshold
from fedslr.core.types import Batch, Params
from fedslr.data.normalization import Normalization, inputs

CHUNK = 1024
Supported = FedSLR
"""The method the theory speaks of."""


class Objective:
    """One client's f_i over all of its training data."""

    def __init__(self, task: Task, x: Tensor, y: Tensor, normalization: Normalization | None = None) -> None:
        self.task = task
        self._normalization, self._dtype = normalization, next(task.model.parameters()).dtype
        self._batches = [Batch(x[i : i + CHUNK], y[i : i + CHUNK]) for i in range(0, len(y), CHUNK)]
        self._shares = [len(b.y) / len(y) for b in self._batches]

    def _parts(self) -> Iterator[tuple[float, Batch]]:
        """Every batch with its share of the data; copies, since a model may work in place on its input."""
        for share, batch in zip(self._shares, self._batches, strict=True):
            yield share, Batch(inputs(batch.x.clone(), self._normalization, self._dtype), batch.y)

    def value(self, w: Params) -> Tensor:
        """f_i(w)."""
        data = sum(share * self.task.loss(w, b) for share, b in self._parts())
        return data + self.task.weight_decay / 2 * tree.dot(w, w)

    def gradient(self, w: Params) -> Params:
        """∇f_i(w)."""
        total = tree.Mean()
        for share, batch in self._parts():
            total.add(self.task.grad(w, batch), share)
        return total.value()

    def data_gradient(self, w: Params) -> Params:
        """∇f_i(w) without the weight decay."""
        return tree.map(lambda g, w: g - self.task.weight_decay * w, self.gradient(w), w)

    def curvature(self, w: Params, steps: int = 20, tolerance: float = 1e-3) -> float:
        """The largest eigenvalue of ∇²f_i(w) in size, by power iteration: a lower estimate of the smoothness L."""
        generator = torch.Generator().manual_seed(0)
        v = tree.map(lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device), w)
        estimate = 0.0
        for _ in range(steps):
            size = tree.norm(v)
            v = tree.map(lambda x, size=size: x / size, v)
            v = self._hessian_times(w, v)
            previous, estimate = estimate, float(tree.norm(v))
            if estimate == 0 or abs(estimate - previous) <= tolerance * estimate:
                break
        return estimate

    def _hessian_times(self, w: Params, v: Params) -> Params:
        free = {k: x.detach().requires_grad_() for k, x in w.items()}
        with torch.enable_grad():
            grads = torch.autograd.grad(self.value(free), list(free.values()), create_graph=True)
            along = tree.dot(dict(zip(free, grads, strict=True)), v)
            products = torch.autograd.grad(along, list(free.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(free, products, strict=True))


def potential(
    w: Params,
    local: Sequence[Params],
    gammas: Sequence[Params],
    objectives: Sequence[Objective],
    eta_g: float,
    rank_penalty: float,
) -> float:
    """D(w, {w_i}, {γ_i}) = 1/M Σ f_i(w_i) + R(w) + 1/M Σ ⟨γ_i, w − w_i⟩ + 1/M Σ ‖w − w_i‖²/(2η_g)."""
    total = 0.0
    for y, gamma, f in zip(local, gammas, objectives, strict=True):
        gap = tree.sub(w, y)
        total += float(f.value(y) + tree.dot(gamma, gap) + tree.dot(gap, gap) / (2 * eta_g))
    regularizer = rank_penalty * sum(float(nuclear_norm(x)) for x in w.values() if is_matrix(x))
    return total / len(local) + regularizer


def stationarity(w: Mapping[str, Tensor | LowRank], gradient: Params, rank_penalty: float) -> float:
    """dist(0, ∇f(w) + ∂R(w)), the residual of (P1), exactly.

    For W = U Σ Vᵀ the subdifferential of ‖·‖_* is {U Vᵀ + Z : UᵀZ = 0, ZV = 0, ‖Z‖₂ ≤ 1}, so the distance has
    two parts: ∇f + λ U Vᵀ on the tangent space, and the excess over λ of the singular values of what is normal to it.
    """
    squares = 0.0
    for name, x in w.items():
        g = gradient[name]
        if not is_matrix(g):
            squares += float((g * g).sum())
            continue
        g = to_matrix(g)
        u, v = _directions(x)
        normal = g - u @ (u.mT @ g)
        normal = normal - (normal @ v) @ v.mT
        tangent = g - normal + rank_penalty * (u @ v.mT)
        excess = soft_threshold(torch.linalg.svdvals(normal), rank_penalty)
        squares += float((tangent * tangent).sum() + (excess * excess).sum())
    return float(squares**0.5)


def _directions(x: Tensor | LowRank) -> tuple[Tensor, Tensor]:
    """The left and right singular vectors of a layer that belong to singular values other than zero."""
    if isinstance(x, LowRank):
        return x.u / x.u.norm(dim=0), x.v
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    zero = s.max() * max(u.shape[0], vh.shape[1]) * torch.finfo(s.dtype).eps
    rank = int((s > zero).sum())
    return u[:, :rank], vh[:rank].mT


def gradient_mapping(w: Params, p: Params, objective: Objective, lr: float, l1_penalty: float) -> float:
    """‖(p − prox_{ημ‖·‖₁}(p − η ∇f_i(w + p)))/η‖, the residual of (P2); the weight decay acts on p."""
    grads = objective.data_gradient(tree.add(w, p))
    wd = objective.task.weight_decay
    mapped = tree.map(lambda p, g: (p - soft_threshold(p - lr * (g + wd * p), lr * l1_penalty)) / lr, p, grads)
    return float(tree.norm(mapped))


def require_supported(algorithm: Algorithm[Any, Any]) -> Supported:
    """The method, if it is one the theory speaks of."""
    if not isinstance(algorithm, FedSLR):
        raise FedslrError(f"diagnostics: they are defined for fedslr, not for {algorithm.name}; leave them out")
    return algorithm


@torch.no_grad()
def diagnose(
    algorithm: FedSLR,
    server: Server,
    clients: Sequence[Client],
    local: Sequence[Params],
    objectives: Sequence[Objective],
    lr: float,
) -> dict[str, float]:
    """Everything above at the end of a round. `local` holds the model every client last uploaded."""
    w = dense(server.w)
    gammas = [c.gamma for c in clients]
    gradients = [f.gradient(w) for f in objectives]
    mappings = [
        gradient_mapping(w, dense(c.p), f, lr, algorithm.l1_penalty) for c, f in zip(clients, objectives, strict=True)
    ]
    smoothness = max(f.curvature(w) for f in objectives)
    gaps = [float(tree.norm(tree.sub(c, g))) for c, g in zip(gammas, gradients, strict=True)]
    return {
        "potential": potential(w, local, gammas, objectives, algorithm.eta_g, algorithm.rank_penalty),
        "stationarity": stationarity(server.w, tree.mean(gradients), algorithm.rank_penalty),
        "gradient_mapping": sum(mappings) / len(mappings),
        "dual_gap": sum(gaps) / len(gaps),
        "dual_mismatch": float(tree.norm(tree.sub(server.gamma, tree.mean(gammas)))),
        "smoothness": smoothness,
        "eta_g_bound": 1 / (2 * smoothness) if smoothness else float("inf"),
    }
