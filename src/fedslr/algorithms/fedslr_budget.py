"""FedSLR with a size instead of penalties: every personal model has a given share of the dense parameters.

The size is N·target_size, where N is the number of dense parameters. Personal parts get personal_share of it, the
global part the rest. Until round cut_at·T of T, phase I is FedSLR's with λ = 0, and the global part is dense. At the
cut every layer gets a rank, once. From then on the global part is the best approximation of these ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedslr.algorithms.fedslr import Client, Factored, TwoPart
from fedslr.core import tree
from fedslr.core.algorithm import LedgerChange, Progress
from fedslr.core.matrix import dense, full_ranks, matrix_shape, to_matrix
from fedslr.core.problem import Problem
from fedslr.core.prox import best_approximations, soft_threshold
from fedslr.core.scan import scan
from fedslr.core.schema import fraction, positive, share
from fedslr.core.types import Batch, LocalData, Params, Round

MIN_RANK = 2
"""The smallest rank of a layer, so that no layer ends the path from inputs to outputs."""

RISE = 0.01
"""A model still learns if its best accuracy rose by more than this in the last quarter of the rounds before the cut."""


class Server(NamedTuple):
    w: Factored
    """The global model: dense until the cut, then factors in the layers whose rank is not full."""
    ranks: Params
    """The rank of every layer, as integer scalars; empty until the cut."""


def stored(x: Tensor, rank: int) -> int:
    """Return the parameters that a layer stores at a rank: r(m + n) of its factors, at most the mn of its matrix."""
    m, n = matrix_shape(tuple(x.shape))
    return min(rank * (m + n), m * n)


def choose_ranks(z: Params, budget: float) -> dict[str, int]:
    """Return the ranks with which a model stores at most `budget` parameters.

    One-dimensional parameters are kept whole. Every layer gets `MIN_RANK`, even if the budget is too small. Then the
    directions of all layers are added in descending order of σ_i/σ_1, their singular values relative to the largest of
    their layer. A layer whose next direction exceeds the budget gets no more. A layer whose factors would be no smaller
    than its matrix stays dense, at the cost of the matrix; its rank is the full one.
    """
    full = full_ranks(z)
    ranks = {k: min(MIN_RANK, most) for k, most in full.items()}
    spent = sum(stored(x, ranks[k]) if k in ranks else x.numel() for k, x in z.items())
    closed: set[str] = set()
    for _, k in _directions({k: z[k] for k in full}):
        extra = stored(z[k], ranks[k] + 1) - stored(z[k], ranks[k])
        if spent + extra > budget:
            closed.add(k)
        if k not in closed:
            ranks[k] += 1
            spent += extra
    return {k: rank if stored(z[k], rank) < z[k].numel() else full[k] for k, rank in ranks.items()}


def _directions(layers: Params) -> list[tuple[float, str]]:
    """Return σ_i/σ_1 and the layer of all directions above `MIN_RANK`, the largest first."""
    found = []
    for k, x in layers.items():
        values = torch.linalg.svdvals(to_matrix(x))
        relative = values / values[0].clamp_min(torch.finfo(values.dtype).tiny)
        found += [(value, k) for value in relative[MIN_RANK:].tolist()]
    return sorted(found, key=lambda direction: -direction[0])


def threshold_of(x: Params, count: int) -> Tensor:
    """Return the value that at most `count` entries of a tree exceed in absolute value; fewer if some are equal."""
    entries = torch.cat([leaf.abs().flatten() for leaf in tree.leaves(x)])
    return entries.kthvalue(max(1, len(entries) - count)).values


def still_rises(history: Sequence[tuple[int, float]], until: float) -> bool:
    """Return whether the best accuracy rose by more than `RISE` in the last quarter of the first `until` rounds."""
    early = [accuracy for rounds, accuracy in history if rounds <= 0.75 * until]
    late = [accuracy for rounds, accuracy in history if 0.75 * until < rounds < until]
    return bool(early and late) and max(late) > max(early) + RISE


def for_each_leaf(value: Tensor, x: Params) -> Params:
    """Return a scalar as a tree whose leaves broadcast to those of x, also after axes of clients were added."""
    return {k: value.reshape([1] * leaf.ndim) for k, leaf in x.items()}


@dataclass(frozen=True)
class FedSLRBudget(TwoPart):
    """FedSLR whose personal models have a given size; the size determines ranks and sparsity."""

    name: ClassVar[str] = "fedslr-budget"
    planned: ClassVar[bool] = True

    eta_g: Annotated[float, positive, "proximal step size η_g of the server"] = 10.0
    target_size: Annotated[float, fraction, "size of a personal model, as a share of the dense parameters"] = 0.3
    personal_share: Annotated[float, share, "share of this size that the personal part gets"] = 1 / 3
    cut_at: Annotated[float, fraction, "share of the rounds after which the global part becomes low-rank"] = 0.7

    def init_server(self, w: Params) -> Any:
        return Server(dict(w), {})

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        """Return z: the rank penalty is 0."""
        return dict(z)

    def aggregate(self, server: Any, ledger: LedgerChange, mean_upload: Any, round: Round) -> Any:
        """w ← z = mean_S v_i − η_g γ̄; from the cut on, its best approximation of the chosen ranks."""
        z = dense(super().aggregate(server, ledger, mean_upload, round).w)
        if not self.is_cut(round):
            return Server({**z}, {})
        ranks = server.ranks or self._choose_ranks(z)
        return Server(best_approximations(z, {k: int(rank) for k, rank in ranks.items()}), ranks)

    def is_cut(self, round: Round) -> bool:
        """Return whether the global model is low-rank after this round; it always is after the last round."""
        return round.number + 1 >= self.cut_at * round.total

    def _choose_ranks(self, z: Params) -> Params:
        ranks = choose_ranks(z, self._shared_size(sum(x.numel() for x in z.values())))
        return {k: torch.tensor(rank, device=z[k].device) for k, rank in ranks.items()}

    def _shared_size(self, dense: int) -> float:
        """Return the parameters that the global part may store."""
        return (1 - self.personal_share) * self.target_size * dense

    def personalize(self, problem: Problem, client: Client, payload: Params, data: LocalData, round: Round) -> Client:
        """Phase II: p ← soft(p − η(∇f(w + p) + wd·p), ημ); then only the s·N largest entries of p remain.

        μ is the value that s·N entries of the gradient |∇f(w + p)| exceed before the phase, in one batch.
        """
        p, lr, wd = dense(client.p), round.lr, problem.weight_decay
        count = int(self.personal_share * self.target_size * sum(x.numel() for x in p.values()))
        gradient = problem.loss_grad(tree.add(payload, p), data.first_batch(phase=2))
        penalty = for_each_leaf(threshold_of(gradient, count), p)

        def step(p: Params, batch: Batch) -> Params:
            grads = problem.loss_grad(tree.add(payload, p), batch)
            return tree.map(lambda p, g, mu: soft_threshold(p - lr * (g + wd * p), lr * mu), p, grads, penalty)

        p = scan(step, p, data.epochs(round.personal_epochs, phase=1))
        kept = for_each_leaf(threshold_of(p, count), p)
        return Client(tree.map(lambda x, least: torch.where(x.abs() > least, x, 0.0), p, kept))

    def advise(self, run: Progress) -> str | None:
        """Warn after the cut of a size that cannot be met, and of a cut that came too early."""
        if not self.is_cut(run.round):
            return None
        if run.shared > self._shared_size(run.dense):
            kept = f"one-dimensional parameters and rank {MIN_RANK} in every layer"
            return f"{kept} take more than the global part's share of target_size; raise target_size"
        if still_rises(run.history, self.cut_at * run.round.total):
            return "the global model was still learning when it became low-rank; raise rounds or cut_at"
        return None
