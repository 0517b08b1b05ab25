"""FedSLR: Huang et al., Fusion of Global and Local Knowledge for Personalized Federated Learning (TMLR 2023).

Every client's model is w + p_i: a low-rank global part learned together (phase I, solving P1) and a sparse personal
part that never leaves the client (phase II, solving P2):

    (P1)  min_w  1/M Σ f_i(w) + λ Σ_l ‖π(w_l)‖_*          (P2)  min_p  f_i(w + p) + μ‖p‖₁

The server keeps only the mean of the duals (Algorithm 3), with full or partial participation (Algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor

from fedslr import tree
from fedslr.local import scan
from fedslr.matrix import LowRank, dense
from fedslr.prox import low_rank, soft_threshold
from fedslr.schema import non_negative, positive
from fedslr.types import Algorithm, Batch, LocalData, Params, Payload, Round, Task, ranks_of


class Server(NamedTuple):
    w: dict[str, Tensor | LowRank]
    """The global model; after a round every matrix is held as the factors its thresholding gave."""
    gamma: Params
    """The mean dual γ̄ = 1/M Σ γ_i."""
    num_clients: int


class Client(NamedTuple):
    p: Params
    """The sparse personal part."""
    gamma: Params
    """The dual γ_i, which tends to ∇f_i(w)."""


@dataclass(frozen=True)
class FedSLR(Algorithm[Server, Client]):
    """A low-rank global model plus a sparse personal part for every client."""

    name: ClassVar[str] = "fedslr"

    eta_g: Annotated[float, positive, "proximal step size η_g of the server"] = 10.0
    rank_penalty: Annotated[float, non_negative, "λ: weight of the nuclear norm of the global part"] = 1e-4
    l1_penalty: Annotated[float, non_negative, "μ: weight of the l1 norm of the personal parts"] = 1e-3

    def init_server(self, w: Params, num_clients: int) -> Server:
        return Server(dict(w), tree.zeros(w), num_clients)

    def init_client(self, w: Params) -> Client:
        return Client(p=tree.zeros(w), gamma=tree.zeros(w))

    def broadcast(self, server: Server) -> Payload:
        """The factors of the last aggregation; the wire sends them where they are smaller than the matrix."""
        return dict(server.w)

    def local_update(
        self, task: Task, client: Client, payload: Params, data: LocalData, round: Round
    ) -> tuple[Client, Payload]:
        """Phase I:  v ← v − η(g(v) − γ_i + (v − w)/η_g), then γ_i ← γ_i + (w − v)/η_g.
        Phase II: p ← soft(p − η g(w + p), η·μ), where the weight decay acts on p.
        """
        w, lr, wd = payload, round.lr, task.weight_decay

        def fit_global(v: Params, batch: Batch) -> Params:
            return tree.map(
                lambda v, g, c, w: v - lr * (g - c + (v - w) / self.eta_g),
                v, task.grad(v, batch), client.gamma, w,
            )  # fmt: skip

        def fuse(p: Params, batch: Batch) -> Params:
            return tree.map(
                lambda p, g: soft_threshold(p - lr * (g + wd * p), lr * self.l1_penalty),
                p, task.loss_grad(tree.add(w, p), batch),
            )  # fmt: skip

        difference = tree.sub(scan(fit_global, w, data.epochs(round.epochs, phase=0)), w)
        gamma = tree.map(lambda c, d: c - d / self.eta_g, client.gamma, difference)
        p = scan(fuse, client.p, data.epochs(round.personal_epochs, phase=1))
        return Client(p, gamma), difference

    def aggregate(self, server: Server, mean_upload: Params, cohort_size: int) -> Server:
        """γ̄ ← γ̄ + |S|/M mean_S(w − v_i)/η_g, then w ← prox(mean_S v_i − η_g γ̄), per layer with threshold λ·η_g."""
        share = cohort_size / server.num_clients
        gamma = tree.map(lambda c, d: c - share * d / self.eta_g, server.gamma, mean_upload)
        z = tree.map(lambda w, d, c: w + d - self.eta_g * c, dense(server.w), mean_upload, gamma)
        return Server(low_rank(z, self.rank_penalty * self.eta_g), gamma, server.num_clients)

    def global_model(self, server: Server) -> Params:
        return dense(server.w)

    def personal_model(self, task: Task, client: Client, payload: Params, data: LocalData) -> Params:
        return tree.add(payload, client.p)

    def deployed(self, client: Client, payload: Payload) -> Payload:
        return {"w": payload, "p": client.p}

    def ranks(self, server: Server) -> dict[str, int]:
        return ranks_of(server.w)
