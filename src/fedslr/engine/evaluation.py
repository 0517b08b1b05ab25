"""Measurements after a round: accuracies, sizes, and the quantities of the convergence theory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedslr.channel.model_size import Sizes, parameters, parameters_of
from fedslr.core import factored
from fedslr.core.algorithm import Diagnosis, RunView
from fedslr.core.group import Group
from fedslr.core.types import Round
from fedslr.engine.batched import MAX_EVALUATED_TOGETHER
from fedslr.engine.results import Engine
from fedslr.engine.roster import Lazy
from fedslr.engine.run_state import RunState
from fedslr.storage.statistics import Evaluation


def evaluate(run: RunState, engine: Engine, group: Group, clients: Sequence[int]) -> Evaluation:
    """Return the test accuracy of some clients under the global model and under their own."""
    mine, shared = group.mine(clients), run.global_model()
    members = run.roster.members(mine)
    payloads = Lazy(len(mine), lambda i: run.delivery.payload(mine[i], members[i]))
    personal = engine.personal_accuracy(mine, members, payloads) if mine else []
    if shared is None:
        return Evaluation(None, group.each(clients, personal))
    of_global = engine.accuracy(shared, mine) if mine else []
    return Evaluation(group.each(clients, of_global), group.each(clients, personal))


def sizes(run: RunState, group: Group, clients: Sequence[int]) -> Sizes:
    """Return the parameters of the dense, the global and the personal models.

    Factors count as they come back from the disk, so that a resumed run reports the same sizes.
    """
    mine = group.mine(clients)
    personal: list[int] = []
    for start in range(0, len(mine), MAX_EVALUATED_TOGETHER):
        parts = []
        for number in mine[start : start + MAX_EVALUATED_TOGETHER]:
            member = run.roster.member(number)
            deployed = run.algorithm.deployed(member.client, run.delivery.parts(number, member))
            parts.append(factored.smaller_forms(deployed))
        personal += parameters_of(parts)
    dense = sum(x.numel() for x in run.start.values())
    return Sizes(dense, parameters(factored.smaller_forms(run.delivery.shared())), group.each(clients, personal))


def diagnose(run: RunState, engine: Engine, round: Round) -> Diagnosis:
    """Return the quantities of the method's convergence theory."""
    numbers = range(len(run.weights))
    members = [run.roster.member(n) for n in numbers]
    view = RunView(
        problem=run.problem,
        server=run.held.server,
        mean_ledger=run.held.mean_ledger,
        clients=[m.client for m in members],
        ledgers=[m.ledger for m in members],
        local_models=[run.roster.local_model(n) for n in numbers],
        data=list(run.work.clients),
        prepare=run.work.prepare,
        round=round,
    )
    with engine.seeded(0, round.number), torch.enable_grad():
        return run.algorithm.diagnose(view)
