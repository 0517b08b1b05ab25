"""FedSLR: Huang et al., Fusion of Global and Local Knowledge for Personalized Federated Learning (TMLR 2023).

Every client's model is w + p_i. All clients learn the global part w together under a regularizer R (phase I, solving
P1). Every client fits its personal part p_i alone under a regularizer R̃ (phase II, solving P2):

    (P1)  min_w  1/M Σ f_i(w) + R(w)          (P2)  min_p  f_i(w + p) + R̃(p)

In FedSLR, R(w) = λ Σ_l ‖π(w_l)‖_* makes the global part low-rank, and R̃(p) = μ‖p‖₁ makes the personal part sparse.
The ledger is the dual γ_i, which tends to ∇f_i(w). The server keeps only the mean of the duals (Algorithm 3), with full
or partial participation (Algorithm 2). `TwoPart` implements the method for any pair of regularizers. `designs.py` has
the other pairs that the paper discusses.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from torch import Tensor

from fedslr.algorithms import theory
from fedslr.core import tree
from fedslr.core.algorithm import Algorithm, Diagnosis, LedgerChange, Phases, Progress, RunView
from fedslr.core.matrix import LowRank, dense
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.prox import low_rank, soft_threshold
from fedslr.core.schema import non_negative, positive
from fedslr.core.types import LocalData, Params, Payload, Round

Factored = dict[str, Tensor | LowRank]
"""A model whose matrices may be low-rank factors."""


class Server(NamedTuple):
    w: Factored
    """The global model; after a round, thresholded matrices are factors."""


class Client(NamedTuple):
    p: Factored
    """The personal part p_i, zero at the start."""


class TwoPart(Algorithm[Server, Client, Params]):
    """A global part plus a personal part, w + p_i, each with a regularizer given by its proximal operator."""

    plain_sgd: ClassVar[Phases] = ("personal",)

    eta_g: float
    """The server's proximal step size η_g."""

    @abstractmethod
    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        """Return the proximal operator of η_g·R at z; `last` is the result of the round before."""

    def init_server(self, w: Params) -> Server:
        return Server(dict(w))

    def init_client(self, w: Params) -> Client:
        return Client(tree.zeros(w))

    def init_ledger(self, w: Params) -> Params:
        return tree.zeros(w)

    def broadcast(self, server: Server, ledger: Params) -> Payload:
        """Return the model of the last aggregation. The channel sends factors if they are smaller than the matrix."""
        return dict(server.w)

    def local_update(
        self, problem: Problem, client: Client, ledger: Params, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """Phase I: v ← v − η(g(v) − γ_i + (v − w)/η_g); the upload is v − w."""
        dual = lambda g, v, c, w: g - c + (v - w) / self.eta_g  # noqa: E731
        batches = data.epochs(round.epochs, phase=0)
        v = descend(problem, payload, batches, round, correct=dual, given=(ledger, payload))
        return client, tree.sub(v, payload)

    def book(self, ledger: Params, upload: Payload, share: Tensor, round: Round) -> Params:
        """γ_i ← γ_i − share·Δ/η_g."""
        return tree.map(lambda c, d: c - share * d / self.eta_g, ledger, upload)

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← prox(mean_S v_i − η_g γ̄)."""
        z = tree.map(lambda w, d, c: w + d - self.eta_g * c, dense(server.w), mean_upload, ledger.after)
        return Server(self.prox_global(z, server.w))

    def personal_model(self, problem: Problem, client: Client, payload: Params, data: LocalData) -> Params:
        return tree.add(payload, dense(client.p))

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return {"w": payload, "p": client.p}


def fit_sparse_part(
    problem: Problem, client: Client, w: Params, data: LocalData, round: Round, l1_penalty: float
) -> Client:
    """Phase II: p ← soft(p − η(∇f(w + p) + wd·p), ημ)."""
    shrink = lambda p, lr: soft_threshold(p, lr * l1_penalty)  # noqa: E731
    batches = data.epochs(round.personal_epochs, phase=1)
    return Client({**descend(problem, dense(client.p), batches, round, offset=w, after=shrink)})


@dataclass(frozen=True)
class FedSLR(TwoPart):
    """A low-rank global model plus a sparse personal part for every client."""

    name: ClassVar[str] = "fedslr"
    has_diagnostics: ClassVar[bool] = True

    eta_g: Annotated[float, positive, "proximal step size η_g of the server"] = 10.0
    rank_penalty: Annotated[float, non_negative, "λ: weight of the nuclear norm of the global part"] = 1e-4
    l1_penalty: Annotated[float, non_negative, "μ: weight of the l1 norm of the personal parts"] = 1e-3

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return low_rank(z, self.rank_penalty * self.eta_g, last)

    def personalize(self, problem: Problem, client: Client, payload: Params, data: LocalData, round: Round) -> Client:
        return fit_sparse_part(problem, client, payload, data, round, self.l1_penalty)

    def diagnose(self, run: RunView) -> Diagnosis:
        return theory.diagnose(run, self.eta_g, self.rank_penalty, self.l1_penalty)

    def advise(self, run: Progress) -> str | None:
        """Advise a larger rank penalty after a fifth of the rounds, a larger l1 penalty after half of them.

        Personal models shrink later than ranks: with well-chosen penalties they may exceed the dense model for a third
        of the rounds. A user who sets a penalty to 0 wants no effect of it.
        """
        done, wrong = (run.round.number + 1) / run.round.total, {}
        if self.rank_penalty and run.ranks and done >= 1 / 5 and run.ranks == run.full_ranks:
            wrong["rank_penalty"] = "no layer has lost rank"
        if self.l1_penalty and run.ranks and done >= 1 / 2 and run.personal > run.dense:
            wrong["l1_penalty"] = "personal models are larger than the dense model"
        if not wrong:
            return None
        remedy = f"raise {' and '.join(wrong)} tenfold, or use fedslr-budget, which takes a size"
        return f"{' and '.join(wrong.values())}; {remedy}"
