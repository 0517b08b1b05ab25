"""Every method as a plain loop: one row of ALGORITHMS.md each, full batches, nothing of the package.

`w`, `v`, `u` are dictionaries of tensors; `f(v, i)` is client i's loss, `df` its gradient, `g` the gradient with weight
decay. Each function gives the global model (None where there is none) and every client's personal model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Model = dict[str, Tensor]


@dataclass
class Problem:
    model: nn.Module
    clients: list[Any]
    cohorts: list[list[int]]
    lr: float
    decay: float
    wd: float
    epochs: int
    personal_epochs: int

    @property
    def M(self) -> int:
        return len(self.clients)

    def start(self) -> Model:
        return {k: p.detach().clone() for k, p in self.model.named_parameters()}

    def loss(self, v: Model, i: int) -> Tensor:
        out = torch.func.functional_call(self.model, v, (self.clients[i].x,))
        return nn.functional.cross_entropy(out, self.clients[i].y)

    def f(self, v: Model, i: int) -> float:
        return float(self.loss(v, i).detach())

    def df(self, v: Model, i: int) -> Model:
        free = {k: p.clone().requires_grad_() for k, p in v.items()}
        return dict(zip(free, torch.autograd.grad(self.loss(free, i), list(free.values())), strict=True))

    def g(self, v: Model, i: int) -> Model:
        return {k: d + self.wd * v[k] for k, d in self.df(v, i).items()}

    def n(self, i: int) -> int:
        return len(self.clients[i].y)

    def rounds(self):
        for t, sampled in enumerate(self.cohorts):
            yield t, sampled, self.lr * self.decay**t


def copies(problem: Problem) -> list[Model]:
    return [problem.start() for _ in range(problem.M)]


def zeros(problem: Problem) -> Model:
    return {k: torch.zeros_like(x) for k, x in problem.start().items()}


def average(models: list[Model], weights: list[float] | None = None) -> Model:
    weights = weights or [1.0] * len(models)
    return {k: sum(a * m[k] for a, m in zip(weights, models, strict=True)) / sum(weights) for k in models[0]}


def svt(x: Tensor, threshold: float) -> Tensor:
    if x.ndim == 1:
        return x
    matrix = x
    if x.ndim == 4:
        o, i, d1, d2 = x.shape
        matrix = x.transpose(1, 2).reshape(o * d1, i * d2)
    u, s, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    matrix = torch.from_numpy(u @ np.diag(np.maximum(s - threshold, 0)) @ v)
    return matrix.reshape(o, d1, i, d2).transpose(1, 2).contiguous() if x.ndim == 4 else matrix


def soft(x: Tensor, threshold: float) -> Tensor:
    return torch.sign(x) * torch.clamp(x.abs() - threshold, min=0)


def sgd(problem: Problem, w: Model, i: int, lr: float, pull: float = 0.0, epochs: int | None = None, to=None) -> Model:
    """FedAvg's step, with an optional pull to another model."""
    v = dict(w)
    for _ in range(problem.epochs if epochs is None else epochs):
        g = problem.g(v, i)
        v = {k: v[k] - lr * (g[k] + (pull * (v[k] - to[k]) if to else 0.0)) for k in v}
    return v


def fedavg(problem: Problem, mu: float = 0.0):
    w = problem.start()
    for _, sampled, lr in problem.rounds():
        w = average([sgd(problem, w, i, lr, mu, to=w) for i in sampled], [problem.n(i) for i in sampled])
    return w, [w] * problem.M


def fedprox(problem: Problem, mu: float):
    return fedavg(problem, mu)


def feddyn(problem: Problem, alpha: float):
    w, h, gamma = problem.start(), zeros(problem), [zeros(problem) for _ in range(problem.M)]
    for _, sampled, lr in problem.rounds():
        found = []
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                g = problem.g(v, i)
                v = {k: v[k] - lr * (g[k] - gamma[i][k] + alpha * (v[k] - w[k])) for k in v}
            gamma[i] = {k: gamma[i][k] - alpha * (v[k] - w[k]) for k in v}
            found.append(v)
        h = {k: h[k] - alpha / problem.M * sum(v[k] - w[k] for v in found) for k in h}
        w = {k: average(found)[k] - h[k] / alpha for k in w}
    return w, [w] * problem.M


def scaffold(problem: Problem):
    w, c, mine = problem.start(), zeros(problem), [zeros(problem) for _ in range(problem.M)]
    for _, sampled, lr in problem.rounds():
        found, change = [], zeros(problem)
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                g = problem.g(v, i)
                v = {k: v[k] - lr * (g[k] - mine[i][k] + c[k]) for k in v}
            new = {k: mine[i][k] - c[k] + (w[k] - v[k]) / (problem.epochs * lr) for k in v}
            change = {k: change[k] + new[k] - mine[i][k] for k in v}
            mine[i] = new
            found.append(v)
        w = average(found)
        c = {k: c[k] + change[k] / problem.M for k in c}
    return w, [w] * problem.M


def ditto(problem: Problem, lam: float):
    w, u = problem.start(), copies(problem)
    for _, sampled, lr in problem.rounds():
        for i in sampled:
            u[i] = sgd(problem, u[i], i, lr, lam, problem.personal_epochs, to=w)
        w = average([sgd(problem, w, i, lr) for i in sampled], [problem.n(i) for i in sampled])
    return w, u


def perfedavg(problem: Problem, alpha: float, beta: float):
    w = problem.start()
    for t, sampled, _ in problem.rounds():
        found = []
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                first = problem.df(v, i)
                second = problem.df({k: v[k] - alpha * first[k] for k in v}, i)
                v = {k: v[k] - beta * problem.decay**t * (second[k] + problem.wd * v[k]) for k in v}
            found.append(v)
        w = average(found, [problem.n(i) for i in sampled])
    personal = []
    for i in range(problem.M):
        d = problem.df(w, i)
        personal.append({k: w[k] - alpha * d[k] for k in w})
    return w, personal


def is_head(name: str, model: Model) -> bool:
    """The MLP's and the CNN's last layer."""
    return name.split(".")[0] == list(model)[-1].split(".")[0]


def fedrep(problem: Problem, head_epochs: int):
    own = copies(problem)
    w = problem.start()
    for _, sampled, lr in problem.rounds():
        found = []
        for i in sampled:
            v = {k: own[i][k] if is_head(k, w) else w[k] for k in w}
            for epochs, head in ((head_epochs, True), (problem.epochs, False)):
                for _ in range(epochs):
                    g = problem.g(v, i)
                    v = {k: v[k] - lr * g[k] if is_head(k, w) == head else v[k] for k in v}
            own[i] = v
            found.append(v)
        w = average(found)
    return None, [{k: own[i][k] if is_head(k, w) else w[k] for k in w} for i in range(problem.M)]


def fedper(problem: Problem):
    own = copies(problem)
    w = problem.start()
    for _, sampled, lr in problem.rounds():
        for i in sampled:
            own[i] = sgd(problem, {k: own[i][k] if is_head(k, w) else w[k] for k in w}, i, lr)
        w = average([own[i] for i in sampled])
    return None, [{k: own[i][k] if is_head(k, w) else w[k] for k in w} for i in range(problem.M)]


def lgfedavg(problem: Problem):
    own = copies(problem)
    w = problem.start()
    for _, sampled, lr in problem.rounds():
        for i in sampled:
            own[i] = sgd(problem, {k: w[k] if is_head(k, w) else own[i][k] for k in w}, i, lr)
        w = average([own[i] for i in sampled])
    return None, [{k: w[k] if is_head(k, w) else own[i][k] for k in w} for i in range(problem.M)]


def apfl(problem: Problem, alpha: float):
    w, u = problem.start(), copies(problem)
    for _, sampled, lr in problem.rounds():
        found = []
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                g = problem.g(v, i)
                v = {k: v[k] - lr * g[k] for k in v}
                d = problem.df({k: alpha * u[i][k] + (1 - alpha) * v[k] for k in v}, i)
                u[i] = {k: u[i][k] - lr * (alpha * d[k] + problem.wd * u[i][k]) for k in v}
            found.append(v)
        w = average(found)
    return w, [{k: alpha * m[k] + (1 - alpha) * w[k] for k in w} for m in u]


def pfedme(problem: Problem, lam: float, inner_steps: int, inner_lr: float, beta: float):
    w, theta = problem.start(), copies(problem)
    for _, sampled, lr in problem.rounds():
        found = []
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                for _ in range(inner_steps):
                    g = problem.g(theta[i], i)
                    theta[i] = {k: x - inner_lr * (g[k] + lam * (x - v[k])) for k, x in theta[i].items()}
                v = {k: v[k] - lr * lam * (v[k] - theta[i][k]) for k in v}
            found.append(v)
        mean = average(found)
        w = {k: (1 - beta) * w[k] + beta * mean[k] for k in w}
    return w, theta


def shifted(x: Tensor, places: int) -> Tensor:
    """Move every value of a tensor, read row by row, some places to the right; the last ones come first."""
    values = x.flatten().tolist()
    for _ in range(places):
        values = [values[-1], *values[:-1]]
    return torch.tensor(values, dtype=x.dtype).reshape(x.shape)


def ifca(problem: Problem, clusters: int):
    models = [{k: shifted(x, j) for k, x in problem.start().items()} for j in range(clusters)]
    for _, sampled, lr in problem.rounds():
        trained: list[list[Model]] = [[] for _ in models]
        for i in sampled:
            j = cluster_of(problem, models, i)
            trained[j].append(sgd(problem, models[j], i, lr))
        models = [average(found) if found else w for w, found in zip(models, trained, strict=True)]
    return None, [models[cluster_of(problem, models, i)] for i in range(problem.M)]


def cluster_of(problem: Problem, models: list[Model], i: int) -> int:
    losses = [problem.f(w, i) for w in models]
    return losses.index(min(losses))


def fedamp(problem: Problem, alpha: float, sigma: float, lam: float):
    w, cloud, trained = copies(problem), copies(problem), set()
    for _, sampled, lr in problem.rounds():
        for i in sampled:
            w[i] = sgd(problem, w[i], i, lr, lam / alpha, to=cloud[i])
            trained.add(i)
        for i in trained:
            shares = {j: alpha * math.exp(-distance(w[i], w[j]) / sigma) / sigma for j in trained if j != i}
            shares[i] = 1 - sum(shares.values())
            cloud[i] = {k: sum(share * w[j][k] for j, share in shares.items()) for k in w[i]}
    return None, w


def distance(a: Model, b: Model) -> float:
    """The squared distance."""
    return sum(float((a[k] - b[k]).square().sum()) for k in a)


def local(problem: Problem):
    u = copies(problem)
    for _, sampled, lr in problem.rounds():
        for i in sampled:
            u[i] = sgd(problem, u[i], i, lr)
    return None, u


def fedspa(problem: Problem, density: float, prune: float):
    w = problem.start()
    counts = erk(w, density)
    masks = [{k: top(w[k].abs(), counts[k]) for k in w} for _ in range(problem.M)]
    T = len(problem.cohorts)
    for t, sampled, lr in problem.rounds():
        changes = []
        for i in sampled:
            m = masks[i]
            begun = {k: w[k] * m[k] for k in w}
            v = dict(begun)
            for _ in range(problem.epochs):
                g = problem.g(v, i)
                v = {k: v[k] - lr * g[k] * m[k] for k in v}
            changes.append({k: v[k] - begun[k] for k in v})
            d, part, new = problem.df(v, i), prune * 0.5 * (1 + math.cos(math.pi * t / T)), {}
            for k in w:
                room = w[k].numel() - counts[k]
                moved = min(math.ceil(part * counts[k]), room)
                left = top(torch.where(m[k], v[k].abs(), torch.tensor(-1.0, dtype=torch.float64)), counts[k] - moved)
                grown = top(torch.where(left, torch.tensor(-1.0, dtype=torch.float64), d[k].abs()), moved)
                new[k] = left | grown
            masks[i] = new
        w = {k: w[k] + average(changes)[k] for k in w}
    return w, [{k: w[k] * m[k] for k in w} for m in masks]


def erk(w: Model, density: float) -> dict[str, int]:
    """ERK by bisection on the scale ε instead of elimination, then the rounding by largest remainders."""
    total = sum(x.numel() for x in w.values())
    vectors = sum(x.numel() for x in w.values() if x.ndim == 1)
    budget = round(density * total) - vectors
    layers = {k: x for k, x in w.items() if x.ndim > 1}
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        filled = sum(min(middle * sum(x.shape), x.numel()) for x in layers.values())
        low, high = (middle, high) if filled < budget else (low, middle)
    exact = {k: min(low * sum(x.shape), x.numel()) for k, x in layers.items()}
    counts = {k: math.floor(e + 1e-9) for k, e in exact.items()}
    for k in sorted(layers, key=lambda k: counts[k] - exact[k])[: budget - sum(counts.values())]:
        counts[k] += 1
    return counts | {k: x.numel() for k, x in w.items() if x.ndim == 1}


def top(scores: Tensor, count: int) -> Tensor:
    mask = np.zeros(scores.numel(), bool)
    mask[np.argsort(-scores.numpy().ravel(), kind="stable")[:count]] = True
    return torch.from_numpy(mask).reshape(scores.shape)


def mixed(problem: Problem, eta_g: float, prox_global, prox_personal, phase_one: str = "duals", lam: float = 0.0):
    """FedSLR and its relatives; all duals stored."""
    w, M = problem.start(), problem.M
    gamma, p = [zeros(problem) for _ in range(M)], [zeros(problem) for _ in range(M)]
    for _, sampled, lr in problem.rounds():
        found = []
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                g = problem.g(v, i)
                if phase_one == "duals":
                    v = {k: v[k] - lr * (g[k] - gamma[i][k] + (v[k] - w[k]) / eta_g) for k in v}
                else:
                    v = {k: v[k] - lr * g[k] for k in v}
                if phase_one == "lpgd":
                    v = {k: svt(x, lr * lam) for k, x in v.items()}
            if phase_one == "duals":
                gamma[i] = {k: gamma[i][k] + (w[k] - v[k]) / eta_g for k in v}
            for _ in range(problem.personal_epochs):
                d = problem.df({k: w[k] + p[i][k] for k in w}, i)
                p[i] = {k: prox_personal(p[i][k] - lr * (d[k] + problem.wd * p[i][k]), lr) for k in w}
            found.append(v)
        mean, dual = average(found), average(gamma)
        w = {k: prox_global(mean[k] - eta_g * dual[k]) for k in w}
    return w, [{k: w[k] + q[k] for k in w} for q in p]


def soft_matrices(x: Tensor, threshold: float) -> Tensor:
    return soft(x, threshold) if x.ndim > 1 else x


def fedslr(problem: Problem, eta_g: float, rank_penalty: float, l1_penalty: float, phase_one: str = "duals"):
    return mixed(
        problem,
        eta_g,
        (lambda z: z) if phase_one == "lpgd" else (lambda z: svt(z, rank_penalty * eta_g)),
        lambda p, lr: soft(p, lr * l1_penalty),
        phase_one,
        rank_penalty,
    )


def as_matrix(x: Tensor) -> np.ndarray:
    """A linear weight is its own matrix; a convolution (o, i, d1, d2) becomes (o·d1, i·d2)."""
    o, i, *kernel = x.shape
    return (x.transpose(1, 2).reshape(o * kernel[0], i * kernel[1]) if kernel else x).numpy()


def as_weight(matrix: np.ndarray, shape: torch.Size) -> Tensor:
    o, i, *kernel = shape
    x = torch.from_numpy(matrix)
    return x.reshape(o, kernel[0], i, kernel[1]).transpose(1, 2).contiguous() if kernel else x


def budgeted_ranks(z: Model, budget: float) -> dict[str, int]:
    """One direction after another, the one with the largest relative singular value that is left."""
    matrices = {k: as_matrix(x) for k, x in z.items() if x.ndim > 1}
    values = {k: np.linalg.svd(a, compute_uv=False) for k, a in matrices.items()}
    ranks = {k: min(2, len(s)) for k, s in values.items()}

    def size(ranks: dict[str, int]) -> int:
        return sum(min(r * sum(matrices[k].shape), matrices[k].size) for k, r in ranks.items())

    whole = sum(x.numel() for x in z.values() if x.ndim == 1)
    open_layers = set(matrices)
    while open_layers := {k for k in open_layers if ranks[k] < len(values[k])}:
        k = max(open_layers, key=lambda k: values[k][ranks[k]] / values[k][0])
        if whole + size(ranks | {k: ranks[k] + 1}) > budget:
            open_layers.remove(k)
        else:
            ranks[k] += 1
    return {k: len(values[k]) if r * sum(matrices[k].shape) >= matrices[k].size else r for k, r in ranks.items()}


def nearest(x: Tensor, rank: int) -> Tensor:
    u, s, v = np.linalg.svd(as_matrix(x), full_matrices=False)
    return as_weight(u[:, :rank] @ np.diag(s[:rank]) @ v[:rank], x.shape)


def least_of(x: Model, count: int) -> float:
    """The largest absolute value that is not among the `count` largest."""
    return float(np.sort(np.abs(np.concatenate([v.numpy().ravel() for v in x.values()])))[::-1][count])


def fedslr_budget(problem: Problem, eta_g: float, target_size: float, personal_share: float, cut_at: float):
    w, M, ranks = problem.start(), problem.M, None
    gamma, p = [zeros(problem) for _ in range(M)], [zeros(problem) for _ in range(M)]
    N = sum(x.numel() for x in w.values())
    count = int(personal_share * target_size * N)
    for t, sampled, lr in problem.rounds():
        found = []
        for i in sampled:
            v = dict(w)
            for _ in range(problem.epochs):
                g = problem.g(v, i)
                v = {k: v[k] - lr * (g[k] - gamma[i][k] + (v[k] - w[k]) / eta_g) for k in v}
            gamma[i] = {k: gamma[i][k] + (w[k] - v[k]) / eta_g for k in v}
            found.append(v)
            mu = least_of(problem.df({k: w[k] + p[i][k] for k in w}, i), count)
            for _ in range(problem.personal_epochs):
                d = problem.df({k: w[k] + p[i][k] for k in w}, i)
                p[i] = {k: soft(p[i][k] - lr * (d[k] + problem.wd * p[i][k]), lr * mu) for k in w}
            least = least_of(p[i], count)
            p[i] = {k: torch.where(x.abs() > least, x, 0.0) for k, x in p[i].items()}
        mean, dual = average(found), average(gamma)
        w = {k: mean[k] - eta_g * dual[k] for k in w}
        if t + 1 >= cut_at * len(problem.cohorts):
            ranks = ranks or budgeted_ranks(w, (1 - personal_share) * target_size * N)
            w = {k: nearest(x, ranks[k]) if k in ranks else x for k, x in w.items()}
    return w, [{k: w[k] + q[k] for k in w} for q in p]


def lpgd(problem: Problem, **options: float):
    return fedslr(problem, **options, phase_one="lpgd")


def gpgd(problem: Problem, **options: float):
    return fedslr(problem, **options, phase_one="gpgd")


def sparse_sparse(problem: Problem, eta_g: float, global_penalty: float, personal_penalty: float):
    return mixed(
        problem, eta_g, lambda z: soft_matrices(z, global_penalty * eta_g), lambda p, lr: soft(p, lr * personal_penalty)
    )


def sparse_lowrank(problem: Problem, eta_g: float, global_penalty: float, personal_penalty: float):
    return mixed(
        problem, eta_g, lambda z: soft_matrices(z, global_penalty * eta_g), lambda p, lr: svt(p, lr * personal_penalty)
    )


def lowrank_lowrank(problem: Problem, eta_g: float, global_penalty: float, personal_penalty: float):
    return mixed(problem, eta_g, lambda z: svt(z, global_penalty * eta_g), lambda p, lr: svt(p, lr * personal_penalty))
