"""FedAvg and FedProx, the methods with nothing but a global model.

FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (AISTATS 2017).
FedProx: Li et al., Federated Optimization in Heterogeneous Networks (MLSys 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fedslr.algorithms.averaged import Averaged
from fedslr.core import tree
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
from fedslr.core.schema import non_negative
from fedslr.core.types import LocalData, Params, Payload, Round


@dataclass(frozen=True)
class FedAvg(Averaged[Any, tuple[()]]):
    """Local SGD, then the mean of the models weighted by the number of examples."""

    name: ClassVar[str] = "fedavg"

    def local_update(
        self, problem: Problem, client: Any, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[Any, Payload]:
        """v ← v − η g(v)."""
        v = descend(problem, payload, data.epochs(round.epochs), round)
        return client, tree.sub(v, payload)

    def weight(self, num_examples: int) -> float:
        return float(num_examples)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose local steps are pulled back to the global model."""

    name: ClassVar[str] = "fedprox"

    mu: Annotated[float, non_negative, "strength μ of the pull ½μ‖v − w‖²"] = 0.01

    def local_update(
        self, problem: Problem, client: Any, ledger: tuple[()], payload: Params, data: LocalData, round: Round
    ) -> tuple[Any, Payload]:
        """v ← v − η(g(v) + μ(v − w))."""
        pull = lambda g, v, w: g + self.mu * (v - w)  # noqa: E731
        v = descend(problem, payload, data.epochs(round.epochs), round, correct=pull, given=(payload,))
        return client, tree.sub(v, payload)
