"""The designs the paper's appendix A.2 and A.3 set beside FedSLR.

`lpgd` and `gpgd` solve (P1) by proximal steps without duals: at every local step, or at the server. They replace
phase I only. The pairs `sparse-sparse`, `sparse-lowrank` and `lowrank-lowrank` (global first; FedSLR is the fourth) are
FedSLR with other regularizers. Singular values are never thresholded in one-dimensional parameters, nor are those of
the global part; a sparse personal part is thresholded everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedslr.algorithms.fedslr import Client, Factored, FedSLR, Mixed, Server
from fedslr.core import tree
from fedslr.core.matrix import dense, is_matrix
from fedslr.core.problem import Task
from fedslr.core.prox import low_rank, soft_threshold
from fedslr.core.scan import scan
from fedslr.core.schema import non_negative, positive
from fedslr.core.types import Batch, LocalData, Params, Round

# --- proximal gradient without duals --------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPGD(FedSLR):
    """FedAvg's local steps, singular values thresholded at the server: global proximal gradient descent."""

    name: ClassVar[str] = "gpgd"
    ledger: ClassVar[tuple[str, ...]] = ()

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(dict(w), {}, num_clients)

    def init_client(self, w: Params) -> Client:
        return Client(p=tree.zeros(w), gamma={})

    def fit_global(self, task: Task, gamma: Params, w: Params, data: LocalData, round: Round) -> tuple[Params, Params]:
        """v ← v − η g(v)."""

        def step(v: Params, batch: Batch) -> Params:
            return self.after_step(tree.map(lambda v, g: v - round.lr * g, v, task.grad(v, batch)), round.lr)

        return {}, tree.sub(scan(step, w, data.epochs(round.epochs, phase=0)), w)

    def after_step(self, v: Params, lr: float) -> Params:
        return v

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        """w ← prox(mean_S v_i), per layer with threshold λ·η_g."""
        return Server(self.prox_global(tree.add(dense(server.w), mean_upload), server.w), {}, server.num_clients)


@dataclass(frozen=True)
class LPGD(GPGD):
    """Singular values thresholded at every local step, a plain mean at the server: local proximal gradient descent."""

    name: ClassVar[str] = "lpgd"

    def after_step(self, v: Params, lr: float) -> Params:
        """v ← SVT(v) with threshold η·λ."""
        return dense(low_rank(v, lr * self.rank_penalty))

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return dict(z)


# --- other pairs of regularizers ------------------------------------------------------------------------------------


def _sparse_matrices(params: Params, threshold: float) -> Factored:
    return {k: soft_threshold(x, threshold) if is_matrix(x) else x for k, x in params.items()}


def _sparse(params: Params, threshold: float) -> Factored:
    return tree.map(lambda x: soft_threshold(x, threshold), params)


@dataclass(frozen=True)
class _Pair(Mixed):
    """FedSLR with regularizers of one's choice."""

    eta_g: Annotated[float, positive, "proximal step size η_g of the server"] = 10.0
    global_penalty: Annotated[float, non_negative, "λ: weight of the global part's regularizer"] = 1e-4
    personal_penalty: Annotated[float, non_negative, "μ: weight of the personal parts' regularizer"] = 1e-3


@dataclass(frozen=True)
class SparseSparse(_Pair):
    """A sparse global model plus a sparse personal part (S+S)."""

    name: ClassVar[str] = "sparse-sparse"

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return _sparse_matrices(z, self.global_penalty * self.eta_g)

    def prox_personal(self, p: Params, lr: float) -> Factored:
        return _sparse(p, lr * self.personal_penalty)


@dataclass(frozen=True)
class SparseLowRank(_Pair):
    """A sparse global model plus a low-rank personal part (S+LR)."""

    name: ClassVar[str] = "sparse-lowrank"

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return _sparse_matrices(z, self.global_penalty * self.eta_g)

    def prox_personal(self, p: Params, lr: float) -> Factored:
        return low_rank(p, lr * self.personal_penalty)


@dataclass(frozen=True)
class LowRankLowRank(_Pair):
    """A low-rank global model plus a low-rank personal part (LR+LR)."""

    name: ClassVar[str] = "lowrank-lowrank"

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return low_rank(z, self.global_penalty * self.eta_g, last)

    def prox_personal(self, p: Params, lr: float) -> Factored:
        return low_rank(p, lr * self.personal_penalty)
