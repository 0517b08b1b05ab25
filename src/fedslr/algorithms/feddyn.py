"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization (ICLR 2021).

FedSLR with rank penalty 0 and η_g = 1/α has exactly these global iterates. The two files share no equation on purpose,
so that each can test the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from fedslr.algorithms.averaged import Averaged, Server
from fedslr.core import tree
from fedslr.core.algorithm import LedgerChange
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.schema import positive
from fedslr.core.types import LocalData, Params, Payload, Round


@dataclass(frozen=True)
class FedDyn(Averaged[tuple[()], Params]):
    """Local SGD on a loss with a linear and a quadratic term, which align the clients' optima with the server's.

    The ledger is the dual γ_i. The server holds the mean h of all duals.
    """

    name: ClassVar[str] = "feddyn"

    alpha: Annotated[float, positive, "strength α of the dynamic regularizer"] = 0.1

    def init_ledger(self, w: Params) -> Params:
        return tree.zeros(w)

    def local_update(
        self, problem: Problem, client: tuple[()], ledger: Params, payload: Params, data: LocalData, round: Round
    ) -> tuple[tuple[()], Payload]:
        """v ← v − η(g(v) − γ_i + α(v − w))."""
        dynamic = lambda g, v, c, w: g - c + self.alpha * (v - w)  # noqa: E731
        v = descend(problem, payload, data.epochs(round.epochs), round, correct=dynamic, given=(ledger, payload))
        return client, tree.sub(v, payload)

    def book(self, ledger: Params, upload: Payload, share: Tensor, round: Round) -> Params:
        """γ_i ← γ_i − share·α(v − w)."""
        return tree.map(lambda c, d: c - share * (self.alpha * d), ledger, upload)

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← mean_S v_i − h/α."""
        return Server(tree.map(lambda w, d, h: w + d - h / self.alpha, server.w, mean_upload, ledger.after))
