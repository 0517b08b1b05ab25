"""FedSpa: Huang et al., Achieving Personalized Federated Learning with Sparse Local Models (2022).

Every client trains the global model under a mask of its own. The density of a mask never changes: after training, the
client prunes its smallest weights and regrows as many at the places with the largest dense gradient (RigL: Evci et al.,
ICML 2020). The layers' densities are those of Erdős–Rényi kernels (ERK; Mocanu et al., 2018). One-dimensional
parameters are always kept and count towards the density. Two details differ from the papers: the first mask keeps the
largest initial weights instead of a random choice, and a weight that was just pruned may be regrown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedslr.algorithms.averaged import Averaged
from fedslr.core import tree
from fedslr.core.errors import FedslrError
from fedslr.core.matrix import is_matrix
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.schema import fraction, share
from fedslr.core.types import LocalData, Params, Payload, Round


class Client(NamedTuple):
    mask: Params
    """True where the client's model has a weight."""


def erk_counts(w: Params, density: float) -> dict[str, int]:
    """Return the number of weights to keep in every layer: ⌊density·all⌉ in total.

    One-dimensional parameters are kept whole. The numbers of the other layers are proportional to the sum of their
    dimensions, so their densities are proportional to Σ dims / Π dims. A layer that would get more weights than it has
    is kept whole, too. The other layers share the rest.
    """
    sizes = {k: x.numel() for k, x in w.items()}
    counts = {k: n for k, n in sizes.items() if not is_matrix(w[k])}
    open_layers = [k for k in w if k not in counts]
    budget = round(density * sum(sizes.values())) - sum(counts.values())
    if budget < 0:
        least = sum(counts.values()) / sum(sizes.values())
        raise FedslrError(
            f"density: got {density:g}, but this model's one-dimensional parameters alone are {least:.2g}; increase it"
        )
    raw = {k: sum(w[k].shape) for k in open_layers}
    while open_layers:
        scale = budget / sum(raw[k] for k in open_layers)
        full = [k for k in open_layers if scale * raw[k] >= sizes[k]]
        if not full:
            break
        for k in full:
            counts[k] = sizes[k]
            budget -= sizes[k]
            open_layers.remove(k)
    exact = {k: budget * raw[k] / sum(raw[j] for j in open_layers) for k in open_layers}
    counts |= {k: math.floor(x) for k, x in exact.items()}
    # Layers that lost most by rounding down get one weight more.
    rest = budget - sum(counts[k] for k in open_layers)
    for k in sorted(open_layers, key=lambda k: counts[k] - exact[k])[:rest]:
        counts[k] += 1
    return counts


def masked(w: Params, mask: Params) -> Params:
    """Return w⊙m. A product would leave negative zeros, which the encoding counts as values."""
    return tree.map(lambda x, m: torch.where(m, x, 0.0), w, mask)


def keep_largest(scores: Tensor, count: int | Tensor) -> Tensor:
    """Return a mask that is True at the `count` largest scores."""
    order = scores.flatten().argsort(descending=True, stable=True)
    places = torch.arange(len(order), device=scores.device)
    ranks = torch.zeros_like(order).scatter(0, order, places)
    return (ranks < count).reshape(scores.shape)


def regrow(v: Tensor, gradient: Tensor, mask: Tensor, kept: int, pruned: float | Tensor) -> Tensor:
    """Return a new mask: drop a share of the kept weights, the smallest; keep as many with the largest gradient."""
    moved = torch.as_tensor(pruned * kept, dtype=torch.float64).ceil().clamp(max=v.numel() - kept)
    stay = keep_largest(torch.where(mask, v.abs(), -1.0), kept - moved)
    return stay | keep_largest(torch.where(stay, -1.0, gradient.abs()), moved)


def annealed(round: Round) -> float | Tensor:
    """Return a cosine from 1 in the first round to 0 after the last; the round's number may be a tensor."""
    angle = math.pi * round.number / round.total
    return (1 + (angle.cos() if isinstance(angle, Tensor) else math.cos(angle))) / 2


@dataclass(frozen=True)
class FedSpa(Averaged[Client, tuple[()]]):
    """Every client trains a sparse model under a mask of its own."""

    name: ClassVar[str] = "fedspa"
    planned: ClassVar[bool] = True

    density: Annotated[float, fraction, "share of the parameters a client keeps"] = 0.5
    prune: Annotated[float, share, "share of the kept weights pruned in the first round; annealed to 0"] = 0.5

    def init_client(self, w: Params) -> Client:
        counts = erk_counts(w, self.density)
        return Client({k: keep_largest(x.abs(), counts[k]) for k, x in w.items()})

    def address(self, client: Client) -> Payload:
        return client.mask

    def addressed(self, payload: Payload, address: Payload, number: int) -> Payload:
        """Return w⊙m_i, the weights that the client keeps."""
        return masked(payload, address)

    def local_update(
        self, problem: Problem, client: Client, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """v ← v − η g(v)⊙m_i from w⊙m_i, then prune and regrow."""
        mask, start = client.mask, masked(payload, client.mask)
        batches = data.epochs(round.epochs, phase=0)
        v = descend(problem, start, batches, round, correct=lambda g, v, m: g * m, given=(mask,))
        dense_gradient = problem.loss_grad(v, data.first_batch(phase=1))
        pruned = self.prune * annealed(round)
        counts = erk_counts(payload, self.density)
        regrown = {k: regrow(v[k], dense_gradient[k], m, counts[k], pruned) for k, m in mask.items()}
        return Client(regrown), tree.sub(v, start)

    def personal_model(self, problem: Problem, client: Client, payload: Params, data: LocalData) -> Params:
        return masked(payload, client.mask)

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return masked(payload, client.mask)
