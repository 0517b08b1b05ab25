"""Quantities of the paper's convergence theory, computed after a round when `diagnostics = true`.

With weight decay, every f_i here includes wd/2·‖·‖², because the algorithm's gradients include it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedslr.core import tree
from fedslr.core.algorithm import Diagnosis, RunView
from fedslr.core.matrix import LowRank, dense, is_matrix, to_matrix
from fedslr.core.problem import Problem
from fedslr.core.prox import nuclear_norm, soft_threshold
from fedslr.core.types import Batch, Params

GRADIENT_BATCH = 1024
"""The number of samples per batch of the full objective."""


class Objective:
    """The objective f_i of one client over all of its training data."""

    def __init__(
        self, problem: Problem, x: Tensor, y: Tensor, prepare: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        self.problem, self._x, self._y, self._prepare = problem, x, y, prepare

    def _parts(self) -> Iterator[tuple[float, Batch]]:
        """Yield every batch with its share of the data."""
        for x, y in zip(self._x.split(GRADIENT_BATCH), self._y.split(GRADIENT_BATCH), strict=True):
            yield len(y) / len(self._y), Batch(self._prepare(x), y)

    def value(self, w: Params) -> Tensor:
        """f_i(w)."""
        data = sum(share * self.problem.loss(w, b) for share, b in self._parts())
        return data + self.problem.weight_decay / 2 * tree.dot(w, w)

    def gradient(self, w: Params) -> Params:
        """∇f_i(w)."""
        total = tree.Mean()
        for share, batch in self._parts():
            total.add(self.problem.grad(w, batch), share)
        return total.value()

    def data_gradient(self, w: Params) -> Params:
        """∇f_i(w) without the weight decay."""
        return tree.map(lambda g, w: g - self.problem.weight_decay * w, self.gradient(w), w)

    def curvature(self, w: Params, steps: int = 20, tolerance: float = 1e-3) -> float:
        """Return the largest |eigenvalue| of ∇²f_i(w) by power iteration, a lower estimate of the smoothness L."""
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
    """Return dist(0, ∇f(w) + ∂R(w)), the exact residual of (P1).

    For W = U Σ Vᵀ the subdifferential of ‖·‖_* is {U Vᵀ + Z : UᵀZ = 0, ZV = 0, ‖Z‖₂ ≤ 1}, so the distance has
    two parts: ∇f + λ U Vᵀ on the tangent space, and the excess over λ of the singular values of the normal part of ∇f.
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
    """Return the left and right singular vectors of a layer whose singular values are not zero."""
    if isinstance(x, LowRank):
        return x.u / x.u.norm(dim=0), x.v
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    zero = s.max() * max(u.shape[0], vh.shape[1]) * torch.finfo(s.dtype).eps
    rank = int((s > zero).sum())
    return u[:, :rank], vh[:rank].mT


def gradient_mapping(w: Params, p: Params, objective: Objective, lr: float, l1_penalty: float) -> float:
    """Return ‖(p − prox_{ημ‖·‖₁}(p − η ∇f_i(w + p)))/η‖, the residual of (P2); the weight decay acts on p."""
    grads = objective.data_gradient(tree.add(w, p))
    wd = objective.problem.weight_decay
    mapped = tree.map(lambda p, g: (p - soft_threshold(p - lr * (g + wd * p), lr * l1_penalty)) / lr, p, grads)
    return float(tree.norm(mapped))


@torch.no_grad()
def diagnose(run: RunView, eta_g: float, rank_penalty: float, l1_penalty: float) -> Diagnosis:
    """Return all quantities of the theory at the end of a round, for FedSLR with these hyperparameters."""
    w = dense(run.server.w)
    objectives = [Objective(run.problem, held.x, held.y, run.prepare) for held in run.data]
    gradients = [f.gradient(w) for f in objectives]
    lr = run.round.in_personal_phase().lr
    mappings = [
        gradient_mapping(w, dense(c.p), f, lr, l1_penalty) for c, f in zip(run.clients, objectives, strict=True)
    ]
    smoothness = max(f.curvature(w) for f in objectives)
    gaps = [float(tree.norm(tree.sub(c, g))) for c, g in zip(run.ledgers, gradients, strict=True)]
    bound = 1 / (2 * smoothness) if smoothness else float("inf")
    figures = {
        "potential": potential(w, run.local_models, run.ledgers, objectives, eta_g, rank_penalty),
        "stationarity": stationarity(run.server.w, tree.mean(gradients), rank_penalty),
        "gradient_mapping": sum(mappings) / len(mappings),
        "dual_gap": sum(gaps) / len(gaps),
        "dual_mismatch": float(tree.norm(tree.sub(run.mean_ledger, tree.mean(run.ledgers)))),
        "smoothness": smoothness,
        "eta_g_bound": bound,
    }
    if eta_g <= bound:
        return Diagnosis(figures)
    return Diagnosis(
        figures,
        f"eta_g = {eta_g:g} is above 1/(2L) = {bound:.3g}, with L estimated in round {run.round.number + 1}; "
        "the convergence theory covers smaller values only",
    )
