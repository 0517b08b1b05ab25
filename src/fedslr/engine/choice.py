"""Which engine runs a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from fedslr.core.errors import FedslrError
from fedslr.core.types import Params, Payload, Round
from fedslr.engine.batched import Batched
from fedslr.engine.cohort_batches import Unbatchable
from fedslr.engine.cuda import Cuda
from fedslr.engine.eager import Eager
from fedslr.engine.results import Engine, Result
from fedslr.engine.settings import Settings
from fedslr.engine.workload import Member, Workload

T = TypeVar("T")

MAX_COHORT_PARAMETERS = 2**22
"""Parameters in the models of a cohort up to which a CPU trains them faster together."""

MIN_COHORT = 4
"""Clients from which on training them together is faster."""

MAX_ROUND_INPUTS = 2**28
"""Numbers in the batches of a round up to which all may be made before it: one GiB in float32."""


def choose(settings: Settings, work: Workload, warn: Callable[[str], None]) -> Engine:
    """Return the engine that was asked for; `auto` takes the CUDA engine on a GPU and the faster one on a CPU."""
    on_gpu = work.device.type == "cuda"
    if settings.engine == "cuda" and not on_gpu:
        raise FedslrError("engine: got 'cuda', but this run is not on a GPU; try auto, or device = 'cuda'")
    if settings.precision not in ("auto", "float32") and not on_gpu:
        raise FedslrError(f"precision: got '{settings.precision}', which only a GPU has; expected auto or float32")
    if settings.precision in ("tf32", "bf16") and settings.dtype != "float32":
        raise FedslrError(
            f"precision: got '{settings.precision}', but dtype = '{settings.dtype}' is multiplied exactly; "
            "expected auto or float32"
        )
    if on_gpu:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        work.problem.tf32 = work.precision != "float32"
        if settings.engine in ("auto", "cuda"):
            return OneByOneIfNeeded(Cuda(work), settings.engine, warn)
    if settings.engine == "batched" or (
        settings.engine == "auto" and not on_gpu and batching_is_faster(settings, work)
    ):
        return OneByOneIfNeeded(Batched(work), settings.engine, warn)
    return Eager(work)


def batching_is_faster(settings: Settings, work: Workload) -> bool:
    """Return whether a CPU should train a cohort together: small models, several clients, similar amounts of work.

    Batching saves the overhead of many small operations, so models must be small. Clients that have done their steps
    wait for the one that has most, so the mean number of steps must be at least half the largest. All batches of a
    round are in memory at once. The rule measures no time: engines differ in the last bits, and a run must not depend
    on how busy a machine is.
    """
    cohort = settings.cohort_size(len(work.examples))
    parameters = sum(p.numel() for p in work.problem.model.parameters())
    steps = [-(-n // settings.batch_size) for n in work.examples]
    passes = settings.epochs + settings.personal_epochs
    inputs = cohort * passes * max(steps) * settings.batch_size * work.clients[0].x.shape[1:].numel()
    balanced = 2 * sum(steps) >= max(steps) * len(steps)
    return (
        cohort >= MIN_COHORT
        and cohort * parameters <= MAX_COHORT_PARAMETERS
        and inputs <= MAX_ROUND_INPUTS
        and balanced
    )


class OneByOneIfNeeded:
    """An engine that trains clients together and, once that fails in `auto` mode, one after another."""

    def __init__(self, engine: Batched, asked: str, warn: Callable[[str], None]) -> None:
        self.engine: Eager = engine
        self._evaluator: Eager = engine
        """The engine that evaluates: what cannot be evaluated together may be trained together."""
        self._asked, self._warn = asked, warn

    @property
    def looks_ahead(self) -> bool:
        return self.engine.looks_ahead

    def train(
        self, cohort: Sequence[int], members: Sequence[Member], payloads: Sequence[Payload], round: Round
    ) -> Iterable[Result]:
        try:
            return self.engine.train(cohort, members, payloads, round)
        except Unbatchable as error:
            self.engine = self._one_by_one(error, "trained together; they train")
            return self.engine.train(cohort, members, payloads, round)

    def expect(self, cohort: Sequence[int], members: Sequence[Member], round: Round) -> None:
        self.engine.expect(cohort, members, round)

    def meanwhile(self, work: Callable[[], T]) -> Callable[[], T]:
        return self.engine.meanwhile(work)

    def personal_model(self, number: int, member: Member, payload: Payload) -> Params:
        return self._evaluator.personal_model(number, member, payload)

    def personal_accuracy(
        self, cohort: Sequence[int], members: Sequence[Member], payloads: Sequence[Payload]
    ) -> list[float | None]:
        return self._evaluate(lambda engine: engine.personal_accuracy(cohort, members, payloads))

    def accuracy(self, params: Params, cohort: Sequence[int]) -> list[float | None]:
        return self._evaluate(lambda engine: engine.accuracy(params, cohort))

    def seeded(self, number: int, round: int) -> AbstractContextManager[None]:
        return self.engine.seeded(number, round)

    def _evaluate(self, call: Callable[[Eager], T]) -> T:
        try:
            return call(self._evaluator)
        except Unbatchable as error:
            self._evaluator = self._one_by_one(error, "evaluated together; they are evaluated")
            return call(self._evaluator)

    def _one_by_one(self, error: Unbatchable, what: str) -> Eager:
        """Return the engine to go on with, unless another one was asked for."""
        if self._asked != "auto":
            raise FedslrError(
                f"engine: got '{self._asked}', but the clients of this run cannot be trained together ({error}); "
                "expected engine = 'auto' or 'eager'"
            ) from error
        if self.engine.work.device.type == "cuda":
            self._warn(f"the clients of this run cannot be {what} one after another")
        return Eager(self.engine.work)
