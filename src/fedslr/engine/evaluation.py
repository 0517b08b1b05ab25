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
from fedslr.engine.eager import Eager
from fedslr.engine.roster import Cohort
from fedslr.engine.run_state import RunState
from fedslr.storage.statistics import Evaluation


def evaluate(run: RunState, engine: Eager, group: Group, clients: Sequence[int]) -> Evaluation:
    """Return the scores of some clients under the global model and under their own."""
    mine, shared = group.mine(clients), run.global_model()
    personal = engine.personal_scores(Cohort(mine, run.roster, payload_of=run.delivery.decoded)) if mine else []
    of_global = engine.scores(shared, mine) if mine and shared is not None else []
    return Evaluation(None if shared is None else group.each(clients, of_global), group.each(clients, personal))


def sizes(run: RunState, group: Group, clients: Sequence[int]) -> Sizes:
    """Return the parameters of the dense, the global and the personal models.

    Factors count as they come back from the disk, so that a resumed run reports the same sizes.
    """
    mine = group.mine(clients)
    personal: list[int] = []
    for start in range(0, len(mine), MAX_EVALUATED_TOGETHER):
        cohort = Cohort(mine[start : start + MAX_EVALUATED_TOGETHER], run.roster, payload_of=run.delivery.compact)
        deployed = [run.algorithm.deployed(member.client, payload) for _, member, payload in cohort]
        personal += parameters_of([factored.smaller_forms(parts) for parts in deployed])
    dense = sum(x.numel() for x in run.start.values())
    return Sizes(dense, parameters(factored.smaller_forms(run.delivery.shared())), group.each(clients, personal))


def diagnose(run: RunState, engine: Eager, round: Round) -> Diagnosis:
    """Return the quantities of the method's convergence theory."""
    numbers = range(len(run.weights))
    members = [run.roster.member(n) for n in numbers]
    view = RunView(
        problem=run.problem,
        server=run.server_state.server,
        mean_ledger=run.server_state.mean_ledger,
        clients=[m.client for m in members],
        ledgers=[m.ledger for m in members],
        local_models=[run.roster.local_model(n) for n in numbers],
        data=list(run.work.clients),
        prepare=run.work.prepare,
        round=round,
    )
    with engine.seeded(0, round.number), torch.enable_grad():
        return run.algorithm.diagnose(view)
