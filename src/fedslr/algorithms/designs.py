"""The designs that appendices A.2 and A.3 of the paper compare with FedSLR.

`gpgd` and `lpgd` solve (P1) by proximal steps without duals, at the server or at every local step. They replace phase I
only. `sparse-sparse`, `sparse-lowrank` and `lowrank-lowrank` are FedSLR with other regularizers; the global part's
comes first. In the global part, one-dimensional parameters are never thresholded. A sparse personal part is thresholded
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from fedslr.algorithms.fedslr import Client, Factored, FedSLR, Server, TwoPart, fit_sparse_part
from fedslr.core import tree
from fedslr.core.algorithm import LedgerChange, Phases
from fedslr.core.matrix import dense, is_matrix
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.prox import low_rank, soft_threshold
from fedslr.core.scan import scan
from fedslr.core.schema import non_negative, positive
from fedslr.core.types import Batch, LocalData, Params, Payload, Round

# --- proximal gradient descent without duals ------------------------------------------------------------------------


@dataclass(frozen=True)
class GPGD(FedSLR):
    """FedAvg's local steps, singular values thresholded at the server: global proximal gradient descent."""

    name: ClassVar[str] = "gpgd"
    has_diagnostics: ClassVar[bool] = False

    def init_ledger(self, w: Params) -> Any:
        return ()

    def book(self, ledger: Any, upload: Payload, share: Tensor, round: Round) -> Any:
        return ledger

    def local_update(
        self, problem: Problem, client: Client, ledger: Any, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """v ← v − η g(v)."""
        v = descend(problem, payload, data.epochs(round.epochs, phase=0), round)
        return client, tree.sub(v, payload)

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← prox(mean_S v_i), per layer with threshold λ·η_g."""
        return Server(self.prox_global(tree.add(dense(server.w), mean_upload), server.w))


@dataclass(frozen=True)
class LPGD(GPGD):
    """Singular values thresholded at every local step, a plain mean at the server: local proximal gradient descent."""

    name: ClassVar[str] = "lpgd"
    plain_sgd: ClassVar[Phases] = ("global", "personal")

    def local_update(
        self, problem: Problem, client: Client, ledger: Any, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """v ← SVT(v − η g(v)) with threshold η·λ."""

        def step(v: Params, batch: Batch) -> Params:
            v = tree.map(lambda v, g: v - round.lr * g, v, problem.grad(v, batch))
            return dense(low_rank(v, round.lr * self.rank_penalty))

        return client, tree.sub(scan(step, payload, data.epochs(round.epochs, phase=0)), payload)

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return dict(z)


# --- other pairs of regularizers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LowRankLowRank(TwoPart):
    """A low-rank global model plus a low-rank personal part (LR+LR)."""

    name: ClassVar[str] = "lowrank-lowrank"

    eta_g: Annotated[float, positive, "proximal step size η_g of the server"] = 10.0
    global_penalty: Annotated[float, non_negative, "λ: weight of the global part's regularizer"] = 1e-4
    personal_penalty: Annotated[float, non_negative, "μ: weight of the personal parts' regularizer"] = 1e-3

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return low_rank(z, self.global_penalty * self.eta_g, last)

    def personalize(self, problem: Problem, client: Client, payload: Params, data: LocalData, round: Round) -> Client:
        """Phase II: p ← SVT(p − η(∇f(w + p) + wd·p)) with threshold η·μ."""
        lr, wd = round.lr, problem.weight_decay

        def step(p: Factored, batch: Batch) -> Factored:
            full = dense(p)
            grads = problem.loss_grad(tree.add(payload, full), batch)
            return low_rank(tree.map(lambda p, g: p - lr * (g + wd * p), full, grads), lr * self.personal_penalty)

        return Client(scan(step, client.p, data.epochs(round.personal_epochs, phase=1)))


@dataclass(frozen=True)
class SparseLowRank(LowRankLowRank):
    """A sparse global model plus a low-rank personal part (S+LR)."""

    name: ClassVar[str] = "sparse-lowrank"

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        threshold = self.global_penalty * self.eta_g
        return {k: soft_threshold(x, threshold) if is_matrix(x) else x for k, x in z.items()}


@dataclass(frozen=True)
class SparseSparse(SparseLowRank):
    """A sparse global model plus a sparse personal part (S+S)."""

    name: ClassVar[str] = "sparse-sparse"

    def personalize(self, problem: Problem, client: Client, payload: Params, data: LocalData, round: Round) -> Client:
        return fit_sparse_part(problem, client, payload, data, round, self.personal_penalty)
