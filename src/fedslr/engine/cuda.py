"""The fast engine: a cohort's whole local training as CUDA graphs, captured once and replayed every round.

The method's `local_update` runs under `torch.vmap`, as in the batched engine, but

- gradients of all clients come from one network whose layers work on the whole cohort (`stacked`);
- `tree.map` over a model's tensors is compiled to one kernel per tensor (`fused_map`);
- all of it is recorded in graphs (`recording`). Their inputs (states, broadcast, batches, step size) stay at one place
  in memory, so that a round is a few copies and launches;
- the server aggregates while the clients personalise.

Methods that read values back to choose a shape or a branch cannot be recorded. The batched engine runs them or, if it
cannot, the eager engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fedslr.core import tree
from fedslr.core.seeds import leave_capture
from fedslr.core.types import Payload, Round
from fedslr.data.normalization import inputs
from fedslr.engine.batched import Batched, T, is_shared, may_come_from_vmap, require_alike, round_tensors
from fedslr.engine.cohort_batches import CohortBatches
from fedslr.engine.fused_map import fuse
from fedslr.engine.recording import GraphMemory, Recording, copy_aliased, room_for
from fedslr.engine.results import CohortResult
from fedslr.engine.stacked import Network, gives_same_outputs, stack_model
from fedslr.engine.stacked_problem import StackedProblem
from fedslr.engine.workload import Member, Participant, Workload


@functools.cache
def _first_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of the server's work, which precedes that of other streams: clients would wait for it."""
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "fedslr-server")


def _states(members: Sequence[Member]) -> Sequence[Any]:
    """Return what a method's functions read of every client."""
    return [(m.client, m.ledger) for m in members]


class Cuda(Batched):
    """Trains a cohort on a GPU by replaying recorded graphs; the next round may overwrite the result of one."""

    problem_kind = StackedProblem
    fills = True

    def __init__(self, work: Workload, *, asked: str = "cuda", warn: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(work, asked=asked, warn=warn)
        self.cohort_problem.network = self._network()  # type: ignore[attr-defined]
        self._recordings: dict[Any, Recording] = {}
        self._memory = GraphMemory.on(self.device) if self.device.type == "cuda" else None
        self._cannot_record = False
        self._between_phases: Callable[[], None] = lambda: None
        self._uploaded: torch.cuda.Event | None = None
        self._shared = True
        """Whether all clients of the last round received the same payload."""
        self._ready: tuple[Any, dict[int, Member]] | None = None
        """The key of the recording whose batches are in place already, and the members whose states are."""

    def _network(self) -> Network | None:
        """Return the model of a cohort, if it can be written and gives the model's outputs."""
        product = "tf32x3" if self.work.precision == "float32" else "tf32"
        exact = stack_model(self.problem.model, False, product)
        shown = inputs(self.clients[0].x[:2], self.work.normalization, self.work.dtype)
        if exact is None or not gives_same_outputs(exact, self.problem.model, shown):
            return None
        rounded = self.work.precision == "bf16" and self.work.dtype == torch.float32
        return stack_model(self.problem.model, True, product) if rounded else exact

    def _train_cohort(self, cohort: Sequence[Participant], round: Round) -> CohortResult:
        self._uploaded = None
        if self._cannot_record:
            with tree.mapped_by(fuse):
                return super()._train_cohort(cohort, round)
        numbers, members, payloads = zip(*self._filled(cohort), strict=True)
        shared = is_shared(payloads)
        key = self._key(numbers, shared, round)
        recording, ready = self._recordings.get(key), self._is_ready(key, cohort)
        self._shared, self._ready = shared, None
        if recording is None:
            batches = self._load_batches(numbers, round.number)
            recording = self._record(batches, _states(members), payloads, shared, round)
            if recording is None:
                self._cannot_record = True
                return self._train_cohort(cohort, round)
            self._recordings[key] = recording
        elif not ready:
            self._load_batches(numbers, round.number)
            recording.load_states(_states(members))
        recording.load(payloads, round)
        self._uploaded = recording.replay()
        return recording.made.without_padding(numbers[: len(cohort)])

    def _is_ready(self, key: Any, cohort: Sequence[Participant]) -> bool:
        """Return whether the batches and states of a cohort are in place already."""
        if self._ready is None or self._ready[0] != key:
            return False
        members = self._ready[1]
        return list(members) == [one.number for one in cohort] and all(
            members[one.number] is one.member for one in cohort
        )

    def _key(self, cohort: Sequence[int], shared: bool, round: Round) -> Any:
        """Return the key of a recording: all that a graph cannot change."""
        return (len(cohort), self.shapes.of(cohort), shared, round.epochs, round.personal_epochs)

    def prepare_next(
        self, numbers: Sequence[int], member_of: Callable[[int], Member], round: Round
    ) -> Mapping[int, Member]:
        """Copy batches and states to where the graphs read them, once the graphs that run now have read theirs."""
        everyone = self._filled(numbers)
        key = self._key(everyone, self._shared, round)
        recording = self._recordings.get(key)
        if recording is None or self._cannot_record or "trained" in self.one_by_one:
            return {}
        members = {number: member_of(number) for number in numbers}
        self._load_batches(everyone, round.number)
        recording.load_states(_states([members[number] for number in everyone]))
        self._ready = (key, members)
        return members

    def _after_uploads(self, uploads: Payload, states: Any) -> Payload:
        uploads = copy_aliased(uploads, states)
        if self.algorithm.personalizes():
            self._between_phases()
        return uploads

    def start_server_work(self, work: Callable[[], T]) -> Callable[[], T]:
        uploaded = self._uploaded
        if uploaded is None:
            return work

        def beside() -> T:
            stream = _first_stream(self.device)
            with torch.cuda.stream(stream):
                stream.wait_event(uploaded)
                made = work()
                stream.synchronize()
            return made

        return _pool().submit(beside).result

    def _record(
        self, batches: CohortBatches, states: Sequence[Any], payloads: Sequence[Payload], shared: bool, round: Round
    ) -> Recording | None:
        """Capture a cohort's round; return None for a method whose work depends on values it reads back."""
        require_alike(states)
        require_alike(payloads)
        clients = len(states)
        room = pytree.tree_map(lambda x: room_for(x, clients), states[0])
        sent = pytree.tree_map(lambda x: room_for(x, None if shared else clients), payloads[0])
        numbers = round_tensors(round, self.device)
        recording = Recording(room, sent, numbers, shared, self._memory)
        recording.load_states(states)
        recording.load(payloads, round)
        asked = round._replace(**numbers)
        with tree.mapped_by(fuse):
            beside = torch.cuda.Stream(self.device)
            beside.wait_stream(torch.cuda.current_stream(self.device))
            try:
                with torch.cuda.stream(beside):
                    # Once for compiling, and to see which batches the method asks for.
                    self._run(batches, room, sent, shared, asked)
                torch.cuda.synchronize(self.device)
                self._between_phases = recording.note_uploads
                recording.capture(lambda: self._run(batches, room, sent, shared, asked), batches)
            except (RuntimeError, TypeError, ValueError) as error:
                if "illegal" in str(error) or "out of memory" in str(error) or not may_come_from_vmap(error):
                    raise
                leave_capture(self.device)
                return None
            finally:
                self._between_phases = lambda: None
        return recording
