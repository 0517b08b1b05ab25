"""The plain engine: one client after another, ordinary PyTorch, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fedslr.core import seeds
from fedslr.core.seeds import seeded
from fedslr.core.types import Params, Payload, Round
from fedslr.data.batches import EVALUATION_ROUND, ShuffledData
from fedslr.engine import contract
from fedslr.engine.results import ClientResult, Result
from fedslr.engine.workload import Member, Participant, Workload
from fedslr.tasks.scoring import Scores

T = TypeVar("T")

CLIENTS_IN_MEMORY = 100
"""Clients whose test data are held at once to evaluate one model."""

EVALUATION_BATCH = 1024
"""Samples per forward pass of a model that does not train."""


class DataOnDemand:
    """A client's data, read when a method first asks for them; most personal models need none."""

    def __init__(self, read: Callable[[], ShuffledData]) -> None:
        self._read = functools.cache(read)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)


class Eager:
    """Runs a method's functions as they are written.

    The batched and the CUDA engine derive from this one. An engine may iterate over a cohort more than once.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.algorithm, self.problem, self.clients = work.algorithm, work.problem, work.clients

    def train(self, cohort: Iterable[Participant], round: Round) -> Iterable[Result]:
        """Train a cohort; yield results as clients finish, in the order of the cohort."""
        return (self._train_one(*participant, round) for participant in cohort)

    def _train_one(self, number: int, member: Member, payload: Payload, round: Round) -> ClientResult:
        client, upload, address = self.local_update(number, member, payload, round)
        if self.algorithm.personalizes():
            client = self.personalize(number, client, payload, round)
        return ClientResult([number], Member(client, member.ledger, address), upload)

    def local_update(self, number: int, member: Member, payload: Payload, round: Round) -> tuple[Any, Payload, Payload]:
        """Return a client's new state, its upload and its address."""
        with self.seeded(number, round.number), noting_client(round, number, self.algorithm.name):
            client, ledger, received = contract.private_copy((member.client, member.ledger, payload))
            data = self._data(number, round.number)
            made = self.algorithm.local_update(self.problem, client, ledger, received, data, round)
            client, upload = contract.require_update(made, payload)
            return client, upload, self.algorithm.address(client)

    def personalize(self, number: int, client: Any, payload: Payload, round: Round) -> Any:
        """Return a client's state after its personal phase, which draws random numbers of its own."""
        with self.seeded(number, round.number, phase=1), noting_client(round, number, self.algorithm.name):
            own, received = contract.private_copy((client, payload))
            data = self._data(number, round.number)
            problem, now = self.problem.in_personal_phase(), round.in_personal_phase()
            made = self.algorithm.personalize(problem, own, received, data, now)
            return contract.require_state("personalize", made)

    def prepare_next(
        self, numbers: Sequence[int], member_of: Callable[[int], Member], round: Round
    ) -> Mapping[int, Member]:
        """Prepare the next round of training; return the members that were read. The next cohort must use these."""
        return {}

    def start_server_work(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin the server's work on uploads if it can run beside clients; return a function that gives its result."""
        return work

    def _data(self, number: int, round: int) -> ShuffledData:
        held, work = self.clients[number], self.work
        return ShuffledData(
            held.x,
            held.y,
            batch_size=work.batch_size,
            seed=work.seed,
            round=round,
            client=number,
            crop_padding=work.crop_padding,
            normalization=work.normalization,
            dtype=work.dtype,
        )

    @contextmanager
    def seeded(self, number: int, round: int, phase: int = 0) -> Iterator[None]:
        """Seed dropout and the like by round and client, so that a resumed run repeats them."""
        drawn = seeds.integer(seeds.NOISE, self.work.seed, round, number, phase)
        with seeded(drawn, self.work.device), torch.no_grad():
            yield

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def personal_model(self, number: int, member: Member, payload: Payload) -> Params:
        """Return the personal model of one client."""
        with self.seeded(number, EVALUATION_ROUND):
            client, received = contract.private_copy((member.client, payload))
            data: Any = DataOnDemand(lambda: self._data(number, EVALUATION_ROUND))
            made = self.algorithm.personal_model(self.problem, client, received, data)
        return contract.require_model("personal_model", made, self.problem.params())

    def personal_scores(self, cohort: Iterable[Participant]) -> list[Scores]:
        """Return each client's scores under its personal model."""
        return [self._scores(self.personal_model(*one), [one.number])[0] for one in cohort]

    def scores(self, params: Params, numbers: Sequence[int]) -> list[Scores]:
        """Return each client's scores under one model."""
        groups = [numbers[i : i + CLIENTS_IN_MEMORY] for i in range(0, len(numbers), CLIENTS_IN_MEMORY)]
        return [found for group in groups for found in self._scores(params, group)]

    @torch.no_grad()
    def _scores(self, params: Params, numbers: Sequence[int]) -> list[Scores]:
        shown = [self.work.shown(n) for n in numbers]
        x = torch.cat([s.x for s in shown])
        steps = range(0, len(x), EVALUATION_BATCH)
        outputs = [self.problem.outputs(params, self.work.prepare(x[i : i + EVALUATION_BATCH])) for i in steps]
        parts = torch.split(torch.cat(outputs).cpu(), [len(s.x) for s in shown])
        return [self.work.scores(s, part) for s, part in zip(shown, parts, strict=True)]


@contextmanager
def noting_client(round: Round, number: int, method: str) -> Iterator[None]:
    """Add to an error in which round and client it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in round {round.number + 1}, client {number} ({method})")
        raise
