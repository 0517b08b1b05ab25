"""All clients of a cohort in one go: `torch.vmap` over their states, data and models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from fedslr.core import tree
from fedslr.core.problem import Task
from fedslr.core.types import Loss, Params, Payload, Round
from fedslr.data.batches import EVALUATION
from fedslr.data.normalization import inputs
from fedslr.engine import contract
from fedslr.engine.cohort_batches import CohortBatches, CohortData, Filled, Shape, Shapes, Unbatchable
from fedslr.engine.eager import CHUNK, Eager

Work = Callable[[Task, Any, Payload, Any, Round], Any]
"""A client's part in a method: task, state, payload, data and round to what it makes of them."""

T = TypeVar("T")

TOGETHER = 10
"""Clients whose models are evaluated at once."""


class Together(NamedTuple):
    """What a cohort made of a round: every tensor has a leading axis of clients."""

    states: Any
    uploads: Payload
    clients: int

    def each(self) -> list[Any]:
        """Every client's new state, in memory of its own."""
        leaves, shape = pytree.tree_flatten(self.states)
        slices = [x.unbind(0) for x in leaves]
        copies = [[torch.empty_like(part) for part in parts] for parts in slices]
        if leaves:
            torch._foreach_copy_([c for parts in copies for c in parts], [p for parts in slices for p in parts])
        return [pytree.tree_unflatten([parts[i] for parts in copies], shape) for i in range(self.clients)]

    def first(self, clients: int) -> Together:
        """Without what those made that only filled the cohort."""
        if clients == self.clients:
            return self
        states, uploads = pytree.tree_map(lambda x: x[:clients], (self.states, self.uploads))
        return Together(states, uploads, clients)

    def upload(self, slot: int) -> Payload:
        """What one client sends, to look at until the next round."""
        return tree.map(lambda x: x[slot], self.uploads)

    def mean(self, weights: Sequence[float]) -> Payload:
        """The weighted mean of the uploads."""
        if len(set(weights)) == 1:
            return tree.map(lambda x: x.mean(0), self.uploads)
        total = sum(weights)

        def weighted(x: Tensor) -> Tensor:
            shares = torch.tensor([w / total for w in weights], dtype=x.dtype, device=x.device)
            return (x * shares.view(-1, *[1] * (x.ndim - 1))).sum(0)

        return tree.map(weighted, self.uploads)


class CohortTask(Task):
    """The learning problem of one client inside `torch.vmap`: gradients are functions of functions."""

    def loss(self, params: Params, batch: Any) -> Tensor:
        """The mean over a batch's own samples: that of the loss itself where nothing fills the batch."""
        if not isinstance(batch, Filled):
            return self.loss_function(self.outputs(params, batch.x, train=True), batch.y)
        outputs = self.outputs(params, batch.inputs, train=True)
        each = torch.vmap(lambda out, y: self.loss_function(out[None], y[None]))(outputs, batch.labels)
        mean: Tensor = (each * batch.weight).sum()
        return mean

    def cohort_outputs(self, params: Params, x: Tensor) -> Tensor:
        """What stacked models say to a batch for each, outside `torch.vmap`."""
        outputs: Tensor = torch.vmap(self.outputs)(params, x)
        return outputs

    def loss_grad(self, params: Params, batch: Any, frozen: Params | None = None) -> Params:
        def loss(params: Params) -> Tensor:
            return self.loss({**params, **frozen} if frozen else params, batch)

        with self.products():
            grads: Params = torch.func.grad(loss)(params)
        return grads


MOST = 256
"""Labels that a loss is tried with, at most."""


def is_mean(loss: Loss, like: Tensor) -> bool:
    """Whether the loss of a batch is the plain mean of its samples' losses: not with weights by class, say."""
    classes = like.shape[1]
    rng = torch.Generator().manual_seed(0)
    every = torch.arange(classes)[:: -(-classes // MOST)]
    # All labels, few of them again and again, and one alone; scores that say nothing, something, and are quite sure.
    for labels in (every, every[torch.randint(min(3, len(every)), (7,), generator=rng)], every[-1:].expand(5)):
        for size in (0.1, 1.0, 10.0):
            drawn = size * torch.randn(len(labels), classes, generator=rng, dtype=torch.float64)
            # Some of them right.
            drawn[::2] += size * torch.nn.functional.one_hot(labels[::2], classes) * 4
            if not _is_mean_of(loss, drawn.to(like.device, like.dtype), labels.to(like.device)):
                return False
    return True


def _is_mean_of(loss: Loss, scores: Tensor, labels: Tensor) -> bool:
    try:
        whole = loss(scores, labels)
        each = torch.stack([loss(scores[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
    except Exception:  # one that cannot be given any label is for engines that take it as it is
        return False
    close = 1e-10 if scores.dtype == torch.float64 else 1e-5
    return bool(torch.allclose(whole, each.mean(), rtol=close, atol=close))


def changing(round: Round, device: torch.device) -> dict[str, Any]:
    """What changes from round to round, as tensors: no part of what is compiled or recorded.

    In double precision, as Python has them.
    """
    return {
        name: torch.tensor(getattr(round, name), dtype=torch.float64, device=device)
        for name in ("lr", "decay", "number")
    }


def require_alike(trees: Sequence[Any]) -> None:
    """Trees that can be stacked: of tensors, and of one shape."""
    leaves = [pytree.tree_leaves(one) for one in trees]
    if any(not isinstance(x, Tensor) for one in leaves for x in one):
        raise Unbatchable("what they hold is not all tensors")
    shapes = [[x.shape for x in one] for one in leaves]
    if any(shape != shapes[0] for shape in shapes):
        raise Unbatchable("what they hold differs in shape")


def stack(trees: Sequence[Any]) -> Any:
    """Trees of one shape as one tree whose tensors have a leading axis."""
    require_alike(trees)
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def seats(clients: int, usual: int) -> int:
    """How many a cohort is filled up to where every size has to be compiled or recorded: few sizes, little in vain.

    From one size to the next it is twice what cohorts drawn by coins deviate by, so that most of them need two sizes.
    """
    step = max(1, round(2 * math.sqrt(usual)))
    return usual + -((usual - clients) // step) * step


def may_be_vmaps(error: Exception) -> bool:
    """Whether `torch.vmap` may have raised it: errors of values, which have other reasons too, begin with its name."""
    return not isinstance(error, ValueError) or str(error).startswith("vmap(")


@contextmanager
def batchable() -> Iterator[None]:
    """What `torch.vmap` cannot do, it says in errors of no kind and no words of their own.

    An error that is the model's or the method's own comes again when clients train one after another. What it does
    more slowly than it might is no matter for people who write no PyTorch.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
            yield
    except (RuntimeError, ValueError) as error:
        if "CUDA" in str(error) or "memory" in str(error):
            raise
        if not may_be_vmaps(error):
            raise
        # Its first sentence: what follows is advice to people who write PyTorch.
        raise Unbatchable(str(error).splitlines()[0].split(". ")[0]) from error


class Batched(Eager):
    """Runs a method's `local_update` once for the whole cohort.

    Numbers are those of the eager engine up to rounding. Methods that look at their numbers, and models that draw
    random numbers, cannot be run this way.
    """

    task_kind: type[CohortTask] = CohortTask
    fills = False
    """Whether cohorts of unusual sizes are filled up, see `seats`."""

    def __init__(self, *args: Any, examples: Sequence[int] | None = None, usual: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.usual = usual
        """How many clients most cohorts have."""
        self.device = self.clients[0].y.device
        self.shapes = Shapes(examples or [len(c.y) for c in self.clients], self.batch_size)
        self.together = self.task_kind(self.task.model, self.task.loss_function, self.task.weight_decay)
        self.together.tf32, self.together.copies = self.task.tf32, self.task.copies
        self._batches: dict[tuple[int, Shape, bool], CohortBatches] = {}
        self._fits = not self.shapes.any.ragged or is_mean(self.task.loss_function, self._scores())
        """Whether the loss can leave out samples that only fill a batch."""

    def _scores(self) -> Tensor:
        """What the model says to a sample."""
        shown = inputs(self.clients[0].x[:1].clone(), self.normalization, self.dtype)
        with torch.no_grad():
            return self.task.outputs(self.task.params(), shown)

    def one_by_one(self) -> Eager:
        """The plain engine for the same run."""
        return Eager(
            self.algorithm, self.task, self.clients, self.batch_size, self.seed, self.crop_padding, self.normalization
        )

    def train(
        self, cohort: Sequence[int], states: Sequence[Any], payloads: Sequence[Payload], round: Round
    ) -> Together:
        """The cohort's work of a round; what it made may be overwritten by the next round's."""
        batches = self._turn_to(self._filled(cohort), round.number)
        shared = all(payload is payloads[0] for payload in payloads)
        payload = payloads[0] if shared else stack(self._filled(payloads))
        with batchable():
            return self._run(batches, stack(self._filled(states)), payload, shared, round).first(len(cohort))

    def _filled(self, cohort: Sequence[T]) -> Sequence[T]:
        """Something of every client, that of the last one again for seats that nobody has."""
        if not self.fills:
            return cohort
        return [*cohort, *[cohort[-1]] * (seats(len(cohort), self.usual) - len(cohort))]

    def _turn_to(self, cohort: Sequence[int], round: int) -> CohortBatches:
        if not self._fits:
            raise Unbatchable("their batches differ in size, and the loss of a batch is not the mean of its samples'")
        shape = self.shapes.of(cohort)
        key = (len(cohort), shape, round == EVALUATION)
        batches = self._batches.get(key)
        if batches is None:
            batches = CohortBatches(shape, self.seed, self.crop_padding, self.normalization, self.dtype, self.device)
            self._batches[key] = batches
        batches.show(cohort, [self.clients[c] for c in cohort], round)
        return batches

    def _run(self, batches: CohortBatches, states: Any, payload: Payload, shared: bool, round: Round) -> Together:
        update = contract.checked_update(self.algorithm.local_update, type(states))
        states, uploads = self._each(update, batches, states, payload, shared, round)
        return Together(states, uploads, len(batches.cohort))

    def _each(
        self, work: Work, batches: CohortBatches, states: Any, payload: Payload, shared: bool, round: Round
    ) -> Any:
        """What every client of the cohort does."""

        def one(slot: Tensor, state: Any, payload: Payload) -> Any:
            return work(self.together, state, payload, CohortData(batches, slot), round)

        slots = torch.arange(len(batches.cohort), device=self.device)
        with torch.no_grad():
            return torch.vmap(one, in_dims=(0, 0, None if shared else 0))(slots, states, payload)

    looks_ahead = False
    """Whether it wants to be told who trains next."""

    def expect(self, cohort: Sequence[int], states: Sequence[Any], round: Round) -> None:
        """The next call of `train` will be for these, with these very states."""

    def meanwhile(self, work: Callable[[], T]) -> Future[T] | None:
        """Do some work with the uploads while clients still learn for themselves; None if none do."""
        return None

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def personal_accuracy(self, cohort: Sequence[int], states: Sequence[Any], payload: Payload) -> Tensor:
        """How many of its test samples every client's own model gets right; not yet read back."""
        batches, like = self._turn_to(cohort, EVALUATION), self.task.params()
        payload = contract.lent(self.algorithm, payload)  # states are stacked, and so copies

        def one(slot: Tensor, state: Any) -> Params:
            made = self.algorithm.personal_model(self.together, state, payload, CohortData(batches, slot))
            return contract.checked_model("personal_model", made, like)

        with batchable(), torch.no_grad():
            slots = torch.arange(len(cohort), device=self.device)
            return self._right(torch.vmap(one)(slots, stack(states)), cohort)

    def shared_accuracy(self, params: Params, cohort: Sequence[int]) -> Tensor:
        """How many of its test samples one model gets right for every client; not yet read back."""
        with batchable(), torch.no_grad():
            return self._right({k: x.expand(len(cohort), *x.shape) for k, x in params.items()}, cohort)

    def _right(self, params: Params, cohort: Sequence[int]) -> Tensor:
        """Right answers by client, of stacked models."""
        held = [self.clients[c] for c in cohort]
        x = pad_sequence([h.x_test for h in held], batch_first=True)
        y = pad_sequence([h.y_test for h in held], batch_first=True, padding_value=-1)
        right = torch.zeros(len(cohort), dtype=torch.int64, device=self.device)
        each = max(1, CHUNK // len(cohort))
        for start in range(0, y.shape[1], each):
            part = slice(start, start + each)
            shown = inputs(x[:, part], self.normalization, self.dtype)
            right += (self.together.cohort_outputs(params, shown).argmax(-1) == y[:, part]).sum(1)
        return right
