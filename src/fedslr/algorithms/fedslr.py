"""FedSLR: Huang et al., Fusion of Global and Local Knowledge for Personalized Federated Learning (TMLR 2023).

Every client's model is w + p_i: a global part with a regularizer R learned together (phase I, solving P1), and a
personal part with a regularizer R̃ that never leaves the client (phase II, solving P2):

    (P1)  min_w  1/M Σ f_i(w) + R(w)          (P2)  min_p  f_i(w + p) + R̃(p)

In FedSLR, R(w) = λ Σ_l ‖π(w_l)‖_* makes the global part low-rank and R̃(p) = μ‖p‖₁ the personal part sparse. The
server keeps only the mean of the duals (Algorithm 3), with full or partial participation (Algorithm 2). `Mixed` is the
method for any pair of regularizers; `designs.py` has the other pairs the paper discusses.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor

from fedslr.core import tree
from fedslr.core.algorithm import Phased, ranks_of
from fedslr.core.matrix import LowRank, dense
from fedslr.core.problem import Task
from fedslr.core.prox import low_rank, soft_threshold
from fedslr.core.scan import scan
from fedslr.core.schema import non_negative, positive
from fedslr.core.types import Batch, LocalData, Params, Payload, Round

Factored = dict[str, Tensor | LowRank]
"""A model whose matrices may be held as factors."""


class Server(NamedTuple):
    w: Factored
    """The global model; after a round every matrix is held as its thresholding gave it."""
    gamma: Params
    """The mean dual γ̄ = 1/M Σ γ_i."""
    num_clients: int


class Client(NamedTuple):
    p: Factored
    """The personal part."""
    gamma: Params
    """The dual γ_i, which tends to ∇f_i(w)."""


class Mixed(Phased[Server, Client]):
    """A global part plus a personal part, w + p_i, each with a regularizer given by its proximal operator."""

    ledger: ClassVar[tuple[str, ...]] = ("gamma",)

    eta_g: float
    """The server's proximal step size η_g."""

    @abstractmethod
    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        """prox of η_g·R: the threshold is λ·η_g. `last` is what it gave a round before."""

    @abstractmethod
    def prox_personal(self, p: Params, lr: float) -> Factored:
        """prox of η·R̃: the threshold is η·μ."""

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(dict(w), tree.zeros(w), num_clients)

    def init_client(self, w: Params) -> Client:
        return Client(p=tree.zeros(w), gamma=tree.zeros(w))

    def broadcast(self, server: Server) -> Payload:
        """The factors of the last aggregation; the wire sends them where they are smaller than the matrix."""
        return dict(server.w)

    def fit(self, task: Task, client: Client, payload: Params, data: LocalData, round: Round) -> tuple[Client, Payload]:
        gamma, difference = self.fit_global(task, client.gamma, payload, data, round)
        return client._replace(gamma=gamma), difference

    def personalize(self, task: Task, client: Client, payload: Params, data: LocalData, round: Round) -> Client:
        return client._replace(p=self.fuse(task, client.p, payload, data, round))

    def fit_global(self, task: Task, gamma: Params, w: Params, data: LocalData, round: Round) -> tuple[Params, Params]:
        """Phase I: v ← v − η(g(v) − γ_i + (v − w)/η_g), then γ_i ← γ_i + (w − v)/η_g; the new dual and v − w."""

        def step(v: Params, batch: Batch) -> Params:
            return tree.map(
                lambda v, g, c, w: v - round.lr * (g - c + (v - w) / self.eta_g),
                v, task.grad(v, batch), gamma, w,
            )  # fmt: skip

        difference = tree.sub(scan(step, w, data.epochs(round.epochs, phase=0)), w)
        return tree.map(lambda c, d: c - d / self.eta_g, gamma, difference), difference

    def fuse(self, task: Task, p: Factored, w: Params, data: LocalData, round: Round) -> Factored:
        """Phase II: p ← prox(p − η g(w + p)), where the weight decay acts on p."""
        lr, wd = round.lr, task.weight_decay

        def step(p: Factored, batch: Batch) -> Factored:
            full = dense(p)
            grads = task.loss_grad(tree.add(w, full), batch)
            return self.prox_personal(tree.later(lambda p, g: p - lr * (g + wd * p), full, grads), lr)

        return scan(step, p, data.epochs(round.personal_epochs, phase=1))

    def book(self, client: Client, upload: Payload, share: float) -> Client:
        """γ_i ← γ_i − share·Δ/η_g."""
        gamma = tree.map(lambda c, d: c - share * d / self.eta_g, client.gamma, upload)
        return client._replace(gamma=gamma)

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        """γ̄ ← γ̄ + |S|/M mean_S(w − v_i)/η_g, then w ← prox(mean_S v_i − η_g γ̄)."""
        share = cohort_size / server.num_clients
        gamma = tree.map(lambda c, d: c - share * d / self.eta_g, server.gamma, mean_upload)
        z = tree.map(lambda w, d, c: w + d - self.eta_g * c, dense(server.w), mean_upload, gamma)
        return Server(self.prox_global(z, server.w), gamma, server.num_clients)

    def resize(self, server: Server, num_clients: int, leaving: Client | None = None) -> Server:
        """γ̄ ← (M γ̄ − γ_leaving)/M', so that it stays the mean of the duals; a new client's dual is zero."""
        gamma = tree.remean(server.gamma, server.num_clients, num_clients, leaving and leaving.gamma)
        return server._replace(gamma=gamma, num_clients=num_clients)

    def global_model(self, server: Server) -> Params:
        return dense(server.w)

    def personal_model(self, task: Task, client: Client, payload: Params, data: LocalData) -> Params:
        return tree.add(payload, dense(client.p))

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return {"w": payload, "p": client.p}

    def ranks(self, server: Server) -> dict[str, int]:
        return ranks_of(server.w)


@dataclass(frozen=True)
class FedSLR(Mixed):
    """A low-rank global model plus a sparse personal part for every client."""

    name: ClassVar[str] = "fedslr"

    eta_g: Annotated[float, positive, "proximal step size η_g of the server"] = 10.0
    rank_penalty: Annotated[float, non_negative, "λ: weight of the nuclear norm of the global part"] = 1e-4
    l1_penalty: Annotated[float, non_negative, "μ: weight of the l1 norm of the personal parts"] = 1e-3

    def prox_global(self, z: Params, last: Factored | None = None) -> Factored:
        return low_rank(z, self.rank_penalty * self.eta_g, last)

    def prox_personal(self, p: Params, lr: float) -> Factored:
        return tree.map(lambda p: soft_threshold(p, lr * self.l1_penalty), p)
