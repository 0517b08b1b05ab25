"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning (ICML 2020), option II."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedslr.algorithms.averaged import Averaged, Server
from fedslr.core import tree
from fedslr.core.algorithm import LedgerChange, Phases
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.types import LocalData, Params, Payload, Round


@dataclass(frozen=True)
class Scaffold(Averaged[tuple[()], Params]):
    """Local SGD whose client drift is corrected by control variates.

    Control variates travel beside the model, so SCAFFOLD sends twice as much as FedAvg. The ledger is the control
    variate c_i. The server holds their mean c. The update of c_i is right for plain SGD only.
    """

    name: ClassVar[str] = "scaffold"
    plain_sgd: ClassVar[Phases] = ("global",)

    def init_ledger(self, w: Params) -> Params:
        return tree.zeros(w)

    def broadcast(self, server: Server, ledger: Params) -> Payload:
        return {"w": server.w, "c": ledger}

    def local_update(
        self, problem: Problem, client: tuple[()], ledger: Params, payload: Payload, data: LocalData, round: Round
    ) -> tuple[tuple[()], Payload]:
        """v ← v − η(g(v) − c_i + c); c_i changes by −c + (w − v)/(Kη), where K is the number of local steps."""
        w, c = payload["w"], payload["c"]
        control = lambda g, v, own, c: g - own + c  # noqa: E731
        v = descend(problem, w, data.epochs(round.epochs), round, correct=control, given=(ledger, c))
        difference, travelled = tree.sub(v, w), data.steps(round.epochs) * round.lr
        return client, {"w": difference, "c": tree.map(lambda c, d: -c - d / travelled, c, difference)}

    def book(self, ledger: Params, upload: Payload, share: Tensor, round: Round) -> Params:
        """c_i ← c_i + share·(c_i⁺ − c_i), where c_i⁺ = c_i − c + (w − v)/(Kη) and the upload holds the difference."""
        return tree.map(lambda c, d: c + share * d, ledger, upload["c"])

    def aggregate(self, server: Server, ledger: LedgerChange, mean_upload: Any, round: Round) -> Server:
        """w ← mean_S v_i."""
        return Server(tree.add(server.w, mean_upload["w"]))

    def clipped(self, upload: Payload) -> Payload:
        """Return the model's part, because control variates have another scale."""
        return {"w": upload["w"]}

    def shared(self, payload: Payload) -> Payload:
        w: Payload = payload["w"]
        return w
