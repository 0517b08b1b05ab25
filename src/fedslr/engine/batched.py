"""Train all clients of a cohort at once: `torch.vmap` over their states, data and models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from fedslr.core.errors import FedslrError
from fedslr.core.problem import Problem
from fedslr.core.types import Params, Payload, Round
from fedslr.data.batches import EVALUATION_ROUND
from fedslr.data.normalization import inputs
from fedslr.engine import contract
from fedslr.engine.cohort_batches import CohortBatches, CohortData, PaddedBatch, Shape, Shapes, Unbatchable
from fedslr.engine.eager import EVALUATION_BATCH, Eager
from fedslr.engine.results import CohortResult, Result
from fedslr.engine.workload import Participant, Workload
from fedslr.tasks.scoring import Scores

ClientFunction = Callable[[Any, Payload, Any], Any]
"""A client's part in a round: a function of its state, payload and data."""

T = TypeVar("T")

MAX_KEPT_BATCHES = 4
"""Cohort sizes whose buffers are kept for their next round; the CUDA engine keeps all, since recordings read them."""

MAX_EVALUATED_TOGETHER = 10
"""Clients whose models are evaluated at once."""


class CohortProblem(Problem):
    """The learning problem of one client inside `torch.vmap`: gradients are functions of functions."""

    def loss(self, params: Params, batch: Any) -> Tensor:
        """Return the mean loss over the samples of a batch, without those that pad it."""
        if not isinstance(batch, PaddedBatch):
            return super().loss(params, batch)
        each = self.loss_function(self.outputs(params, batch.inputs, train=True), batch.labels)
        return (each * batch.weight).sum()

    def loss_sum(self, params: Params, batch: Any) -> Tensor:
        loss = self.loss(params, batch)
        # Every sample of a padded batch has the weight 1/size.
        return loss / batch.weight.amax() if isinstance(batch, PaddedBatch) else loss * len(batch.y)

    def cohort_outputs(self, params: Params, x: Tensor) -> Tensor:
        """Return the outputs of stacked models, each on its own batch; called outside `torch.vmap`."""
        outputs: Tensor = torch.vmap(self.outputs)(params, x)
        return outputs

    def loss_grad(self, params: Params, batch: Any, frozen: Params | None = None) -> Params:
        def loss(params: Params) -> Tensor:
            return self.loss({**params, **frozen} if frozen else params, batch)

        with self.products():
            grads: Params = torch.func.grad(loss)(params)
        return grads


def round_tensors(round: Round, device: torch.device) -> dict[str, Any]:
    """Return the values that change every round as double-precision tensors, so that a recording can read them."""
    return {
        name: torch.tensor(getattr(round, name), dtype=torch.float64, device=device)
        for name in ("lr", "decay", "number")
    }


def require_alike(trees: Sequence[Any]) -> None:
    """Refuse trees that cannot be stacked: leaves must be tensors of the same shapes."""
    leaves = [pytree.tree_leaves(one) for one in trees]
    if any(not isinstance(x, Tensor) for one in leaves for x in one):
        raise Unbatchable("their states hold values that are no tensors")
    shapes = [[x.shape for x in one] for one in leaves]
    if any(shape != shapes[0] for shape in shapes):
        raise Unbatchable("their states differ in shape")


def is_shared(payloads: Sequence[Payload]) -> bool:
    """Return whether all clients received the same payload."""
    return all(payload is payloads[0] for payload in payloads)


def stack_trees(trees: Sequence[Any]) -> Any:
    """Return trees of the same shapes as one tree whose tensors have a leading axis of clients."""
    require_alike(trees)
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def padded_size(clients: int, usual: int) -> int:
    """Return the size to which a cohort is padded, so that few sizes have to be recorded.

    Sizes are two standard deviations of a cohort drawn by coins apart, so that most rounds need one of two sizes.
    """
    step = max(1, round(2 * math.sqrt(usual)))
    return usual + -((usual - clients) // step) * step


def may_come_from_vmap(error: Exception) -> bool:
    """Return whether `torch.vmap` may have raised an error. Its own ValueErrors begin with its name."""
    return not isinstance(error, ValueError) or str(error).startswith("vmap(")


@contextmanager
def reporting_unbatchable() -> Iterator[None]:
    """Turn the errors that `torch.vmap` raises for unsupported operations into `Unbatchable`.

    vmap raises ordinary RuntimeErrors. An error of the model or the method itself is raised again when clients train
    one after another. vmap's performance warnings concern authors of PyTorch code and are suppressed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
            yield
    except (RuntimeError, ValueError) as error:
        of_the_machine = "CUDA" in str(error) or "out of memory" in str(error)
        if of_the_machine or not may_come_from_vmap(error):
            raise
        # Later sentences of the message advise authors of PyTorch code.
        raise Unbatchable(str(error).splitlines()[0].split(". ")[0]) from error


class Batched(Eager):
    """Runs a method's `local_update` once for the whole cohort.

    Results are those of the eager engine up to rounding. Methods that read values, and models that draw random
    numbers, cannot be run this way: with `engine = "auto"` their clients then run one after another.
    """

    problem_kind: type[CohortProblem] = CohortProblem
    fills = False
    """Whether cohorts of unusual sizes are padded, see `padded_size`."""

    def __init__(
        self, work: Workload, *, asked: str = "batched", warn: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(work)
        self.device, self._asked, self._warn = work.device, asked, warn
        self.shapes = Shapes(work.examples or [len(c.y) for c in self.clients], work.batch_size)
        problem = self.problem
        self.cohort_problem = self.problem_kind(
            problem.model, problem.loss_function, problem.weight_decay, problem.steps, problem.personal_steps
        )
        self.cohort_problem.tf32 = problem.tf32
        self._batches: dict[tuple[int, Shape, bool], CohortBatches] = {}
        self.one_by_one: set[str] = set()
        """The work that clients do one after another from now on, because they cannot do it together."""

    def _together(self, work: str, together: Callable[[], T], one_by_one: Callable[[], T]) -> T:
        """Train or evaluate clients together; if that is impossible, one after another from now on."""
        if work not in self.one_by_one:
            try:
                return together()
            except Unbatchable as error:
                if self._asked != "auto":
                    raise FedslrError(
                        f"engine: got '{self._asked}', but the clients of this run cannot be {work} together "
                        f"({error}); expected engine = 'auto' or 'eager'"
                    ) from error
                self.one_by_one.add(work)
                if self.device.type == "cuda":
                    self._warn(f"the clients of this run cannot be {work} together; they are {work} one after another")
        return one_by_one()

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, cohort: Iterable[Participant], round: Round) -> Iterable[Result]:
        return self._together(
            "trained", lambda: [self._train_cohort(list(cohort), round)], partial(super().train, cohort, round)
        )

    def _train_cohort(self, cohort: Sequence[Participant], round: Round) -> CohortResult:
        numbers, members, payloads = zip(*self._filled(cohort), strict=True)
        batches, shared = self._load_batches(numbers, round.number), is_shared(payloads)
        payload = contract.private_copy(payloads[0]) if shared else stack_trees(payloads)
        with reporting_unbatchable():
            states = stack_trees([(m.client, m.ledger) for m in members])
            return self._run(batches, states, payload, shared, round).without_padding(numbers[: len(cohort)])

    def _filled(self, cohort: Sequence[T]) -> Sequence[T]:
        """Return a cohort padded with copies of its last entry, up to a size that may be recorded already."""
        if not self.fills:
            return cohort
        return [*cohort, *[cohort[-1]] * (padded_size(len(cohort), self.work.usual_cohort) - len(cohort))]

    def _load_batches(self, cohort: Sequence[int], round: int) -> CohortBatches:
        if self.shapes.any.ragged and not self.work.loss_per_sample:
            raise Unbatchable("their batches differ in size, and the loss does not return one value per sample")
        shape = self.shapes.of(cohort)
        key = (len(cohort), shape, round == EVALUATION_ROUND)
        batches = self._batches.get(key)
        if batches is None:
            if not self.fills and len(self._batches) == MAX_KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            batches = self._batches[key] = CohortBatches(shape, self.work)
        batches.load(cohort, [self.clients[c] for c in cohort], round)
        return batches

    def _run(self, batches: CohortBatches, states: Any, payload: Payload, shared: bool, round: Round) -> CohortResult:
        method = self.algorithm
        form = payload if shared else pytree.tree_map(lambda x: x[0], payload)

        def update(state: Any, payload: Payload, data: Any) -> Any:
            client, ledger = state
            made = method.local_update(self.cohort_problem, client, ledger, payload, data, round)
            client, upload = contract.require_update(made, form)
            return client, upload, method.address(client)

        def personalize(client: Any, payload: Payload, data: Any) -> Any:
            problem, now = self.cohort_problem.in_personal_phase(), round.in_personal_phase()
            made = method.personalize(problem, client, payload, data, now)
            return contract.require_state("personalize", made)

        clients, uploads, addresses = self._each(update, batches, states, payload, shared)
        uploads = self._after_uploads(uploads, states)
        if method.personalizes():
            clients = self._each(personalize, batches, clients, payload, shared)
        return CohortResult(batches.cohort, clients, states[1], addresses, uploads)

    def _after_uploads(self, uploads: Payload, states: Any) -> Payload:
        """Return the uploads; called between the two phases of a round."""
        return uploads

    def _each(self, work: ClientFunction, batches: CohortBatches, states: Any, payload: Payload, shared: bool) -> Any:
        """Do some work for every client of the cohort."""

        def one(slot: Tensor, state: Any, payload: Payload) -> Any:
            return work(state, payload, CohortData(batches, slot))

        slots = torch.arange(len(batches.cohort), device=self.device)
        with torch.no_grad():
            return torch.vmap(one, in_dims=(0, 0, None if shared else 0))(slots, states, payload)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def personal_scores(self, cohort: Iterable[Participant]) -> list[Scores]:
        return self._together(
            "evaluated", lambda: self._personal_scores(cohort), partial(super().personal_scores, cohort)
        )

    def scores(self, params: Params, numbers: Sequence[int]) -> list[Scores]:
        return self._together(
            "evaluated", lambda: self._global_scores(params, numbers), partial(super().scores, params, numbers)
        )

    def _personal_scores(self, cohort: Iterable[Participant]) -> list[Scores]:
        left, found = iter(cohort), []
        while group := list(islice(left, MAX_EVALUATED_TOGETHER)):
            numbers, members, payloads = zip(*group, strict=True)
            with reporting_unbatchable(), torch.no_grad():
                models = self._personal_models(numbers, [m.client for m in members], payloads)
                found += self._stacked_scores(models, numbers)
        return found

    def _personal_models(self, cohort: Sequence[int], states: Sequence[Any], payloads: Sequence[Payload]) -> Params:
        """Return the personal models of some clients, stacked."""
        batches, like, shared = self._load_batches(cohort, EVALUATION_ROUND), self.problem.params(), is_shared(payloads)

        def model(state: Any, payload: Payload, data: Any) -> Params:
            made = self.algorithm.personal_model(self.cohort_problem, state, payload, data)
            return contract.require_model("personal_model", made, like)

        sent = contract.private_copy(payloads[0]) if shared else stack_trees(payloads)
        made: Params = self._each(model, batches, stack_trees(states), sent, shared)
        return made

    @torch.no_grad()
    def _global_scores(self, params: Params, numbers: Sequence[int]) -> list[Scores]:
        found = []
        with reporting_unbatchable():
            for start in range(0, len(numbers), MAX_EVALUATED_TOGETHER):
                group = numbers[start : start + MAX_EVALUATED_TOGETHER]
                found += self._stacked_scores({k: x.expand(len(group), *x.shape) for k, x in params.items()}, group)
        return found

    def _stacked_scores(self, params: Params, numbers: Sequence[int]) -> list[Scores]:
        """Return the scores of every client's stacked model on its own samples."""
        shown = [self.work.shown(n) for n in numbers]
        x = pad_sequence([s.x for s in shown], batch_first=True)
        each = max(1, EVALUATION_BATCH // len(numbers))
        parts = [x[:, start : start + each] for start in range(0, x.shape[1], each)]
        made = [
            self.cohort_problem.cohort_outputs(params, inputs(part, self.work.normalization, self.work.dtype))
            for part in parts
        ]
        outputs = torch.cat(made, 1).cpu()
        return [self.work.scores(s, outputs[i, : len(s.x)]) for i, s in enumerate(shown)]
