"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (AISTATS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedslr.algorithms.averaged import Averaged
from fedslr.core import tree
from fedslr.core.optim import descend
from fedslr.core.problem import Problem
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
