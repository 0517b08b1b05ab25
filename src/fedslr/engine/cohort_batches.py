"""The batches of a whole cohort as tensors with a leading axis of clients, for engines that train clients together.

Every client sees the batches `ShuffledData` would give it. Where clients hold different numbers of samples they are
padded and masked, here and nowhere else: short batches are filled up with samples of weight 0, and steps beyond a
client's last are marked, for `scan` to leave its carry as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedslr.core import seeds
from fedslr.core.types import Amount, Batch, Steps, count_batches
from fedslr.data.augment import FlipsAndCrops, apply_flips_and_crops, draw_flips_and_crops
from fedslr.data.client_data import ClientData
from fedslr.data.normalization import inputs
from fedslr.engine.workload import Workload


class Unbatchable(Exception):
    """A method or a model whose clients cannot be trained together."""


class PaddedBatch:
    """A batch that padding samples fill up. Only the problem reads it, because it leaves out the padding."""

    __slots__ = ("inputs", "labels", "weight")

    def __init__(self, inputs: Tensor, labels: Tensor, weight: Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self.weight = weight
        """1/size for the batch's own samples, 0 for padding."""

    def _looked_into(self, *_: Any) -> Any:
        raise Unbatchable("the method looks into batches itself, and clients hold different numbers of samples")

    x = y = property(_looked_into)
    __getitem__ = __iter__ = __len__ = _looked_into


pytree.register_pytree_node(
    PaddedBatch, lambda batch: ([batch.inputs, batch.labels, batch.weight], None), lambda parts, _: PaddedBatch(*parts)
)


class Passes(NamedTuple):
    """The batches of some passes over the data, as tensors of shape (clients, steps, samples, …)."""

    x: Tensor
    y: Tensor
    weight: Tensor
    active: Tensor
    """(clients, steps): whether the client has that step. A batch that follows the last step is no step."""
    partner: Tensor
    """(clients, steps): the step whose batch comes next in the same epoch; the first after the last."""


class Shape(NamedTuple):
    """The dimensions of the tensors that hold a cohort's batches."""

    steps: int
    """Batches per pass of the client that has most."""
    batch: int
    ragged: bool
    """Whether clients hold different numbers of samples."""
    sizes: tuple[int, ...]
    """Samples of every batch of a pass, where all clients are alike."""

    @classmethod
    def of(cls, examples: Sequence[int], batch_size: int) -> Shape:
        most = max(examples)
        sizes = tuple(min(batch_size, most - start) for start in range(0, most, batch_size))
        return cls(len(sizes), min(batch_size, most), min(examples) != most, sizes)


class Shapes:
    """The shapes that the cohorts of a run use: one that fits every cohort, and one without padding.

    A cohort of clients that all hold the most common number of samples needs no padding.
    """

    WORTH = 0.5
    """The share of cohorts without padding from which on they get a shape, and a recording, of their own."""

    def __init__(self, examples: Sequence[int], batch_size: int) -> None:
        self.examples = examples
        self.common, held = Counter(examples).most_common(1)[0]
        self.share = held / len(examples)
        self.any = Shape.of(examples, batch_size)
        self.usual = Shape.of([self.common], batch_size)

    def of(self, cohort: Sequence[int]) -> Shape:
        """The shape of some clients."""
        alike = self.share ** len(cohort) >= self.WORTH and all(self.examples[c] == self.common for c in cohort)
        return self.usual if alike else self.any


class CohortBatches:
    """The batches of one cohort after another, in buffers that stay in place."""

    def __init__(self, shape: Shape, work: Workload) -> None:
        self.shape, self.seed, self.crop_padding = shape, work.seed, work.crop_padding
        self.normalization, self.dtype, self.device = work.normalization, work.dtype, work.device
        self.passes: dict[tuple[Amount, int], Passes] = {}
        self.cohort: Sequence[int] = ()
        self.between_steps: Callable[[], None] = lambda: None
        """Called before every step; an engine may want to know."""
        self.counts: Tensor | None = None
        """(clients, 2): samples and batches per pass, where clients differ."""
        self.numbers: Tensor | None = None
        """The number of every client."""

    def load(self, cohort: Sequence[int], clients: Sequence[ClientData], round: int) -> None:
        """Fill the buffers with the batches of a cohort and a round."""
        self.cohort, self.round = cohort, round
        self.examples = [len(c.y) for c in clients]
        numbers = self._send(np.array(cohort, np.int64))
        self.numbers = numbers if self.numbers is None else self.numbers.copy_(numbers)
        self._x, self._y = torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients])
        if self.shape.ragged:
            self._count(self.examples)
        for request, passes in self.passes.items():
            for old, new in zip(passes, self._make(*request), strict=True):
                old.copy_(new)

    def _count(self, examples: Sequence[int]) -> None:
        """Write the numbers of samples and batches of every client into a buffer that stays in place."""
        found = self._send(np.array([(n, -(-n // self.shape.batch)) for n in examples])).to(self.dtype)
        if self.counts is None:
            self.counts = found
        else:
            self.counts.copy_(found)

    def take(self, count: Amount, phase: int) -> Passes:
        """Return the padded batches of `count` epochs, or of some steps, of a training phase."""
        if (count, phase) not in self.passes:
            self.passes[count, phase] = self._make(count, phase)
        return self.passes[count, phase]

    def _make(self, count: Amount, phase: int) -> Passes:
        clients, batch = len(self.cohort), self.shape.batch
        most = count_batches(count, self.shape.steps)
        # The last of a number of steps may be paired with the batch after it.
        slots = (most + isinstance(count, Steps)) * batch
        order = np.zeros((clients, slots), np.int64)
        weight = np.zeros((clients, slots))
        augmentation = FlipsAndCrops(np.zeros((clients, slots), bool), *np.full((2, clients, slots), self.crop_padding))
        partner = np.zeros((clients, slots // batch), np.int64)
        begin = 0
        for i, (client, examples) in enumerate(zip(self.cohort, self.examples, strict=True)):
            rng = seeds.generator(seeds.SHUFFLE, self.seed, self.round, client, phase)
            steps = -(-examples // batch)
            last = -(-count_batches(count, steps) // steps) * steps  # of whole passes
            for first in range(0, last, steps):
                at = slice(first * batch, min(first * batch + examples, slots))
                kept = at.stop - at.start
                order[i, at] = begin + rng.permutation(examples)[:kept]
                weight[i, at] = _weights(examples, batch)[:kept]
                if self.crop_padding:
                    for all_of_it, drawn in zip(
                        augmentation, draw_flips_and_crops(examples, self.crop_padding, rng), strict=True
                    ):
                        all_of_it[i, at] = drawn[:kept]
                following = first + (np.arange(steps) + 1) % steps
                partner[i, first : first + steps] = following[: slots // batch - first]
            order[i, last * batch :] = begin
            begin += examples
        active = weight.reshape(clients, -1, batch)[:, :most, 0] > 0
        return self._gather(order, weight, augmentation, active, partner)

    def _gather(self, order: Any, weight: Any, augmentation: FlipsAndCrops, active: Any, partner: Any) -> Passes:
        samples = self._send(order).flatten()
        x = inputs(self._x.index_select(0, samples), self.normalization, self.dtype)
        if self.crop_padding:
            x = apply_flips_and_crops(
                x, self.crop_padding, FlipsAndCrops(*(self._send(part).flatten() for part in augmentation))
            )
        fold = (len(order), -1, self.shape.batch)
        return Passes(
            x.reshape(*fold, *x.shape[1:]),
            self._y.index_select(0, samples).reshape(*fold, *self._y.shape[1:]),
            self._send(weight).to(self.dtype).reshape(fold),
            self._send(active),
            self._send(partner),
        )

    def _send(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _weights(examples: int, batch: int) -> Any:
    """Return the weight of every sample of a pass: 1/size of its batch."""
    weights = np.full(examples, 1 / batch)
    if short := examples % batch:
        weights[-short:] = 1 / short
    return weights


def _row(x: Tensor, at: Tensor) -> Tensor:
    """x[at]: before PyTorch 2.11 `torch.vmap` reads back a number that a tensor is indexed by."""
    return x.index_select(0, at.reshape(1))[0]


def _cell(x: Tensor, row: Tensor, column: Any) -> Tensor:
    """x[row, column]."""
    return _row(x.flatten(0, 1), row * x.shape[1] + column)


class StepsOf:
    """The steps of one client of a cohort, inside `torch.vmap`: what `scan` walks through."""

    def __init__(self, batches: CohortBatches, passes: Passes, slot: Tensor, pairs: bool = False) -> None:
        self.shape, self.between_steps = batches.shape, batches.between_steps
        self.recorded = batches.device.type == "cuda"
        self.passes, self.slot, self.pairs = passes, slot, pairs
        # Once for all steps: a step's batch is then a view.
        self.own = [_row(part, slot) for part in passes[:3]] if batches.device.type == "cpu" else None

    def __iter__(self) -> Iterator[Any]:
        if self.shape.ragged:
            raise Unbatchable(
                "the method goes through batches without scan, and clients hold different numbers of them"
            )
        return self._items()

    def _items(self) -> Iterator[Any]:
        return (self._item(step) for step in range(self.passes.active.shape[1]))

    def scan(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        if self.recorded:
            # Give every client its own copy of shared values at once, so that the first step is like the others.
            carry = pytree.tree_map(lambda x: torch.where(self.slot >= 0, x, x), carry)
        for number, item in enumerate(self._items()):
            self.between_steps()
            new = step(carry, item)
            if self.shape.ragged:
                active = _cell(self.passes.active, self.slot, number)
                new = pytree.tree_map(lambda a, b, here=active: torch.where(here, a, b), new, carry)
            carry = new
        return carry

    def _item(self, step: int) -> Any:
        if not self.pairs:
            return self.batch(step)
        within = step % self.shape.steps
        following = (
            _cell(self.passes.partner, self.slot, step)
            if self.shape.ragged
            else step - within + (within + 1) % self.shape.steps
        )
        return self.batch(step), self.batch(following)

    def batch(self, step: Any) -> Batch | PaddedBatch:
        """One batch; where all clients are alike, without what fills it."""
        if self.own is not None:
            x, y, weight = (part[step] if isinstance(step, int) else _row(part, step) for part in self.own)
        else:
            x, y, weight = (_cell(part, self.slot, step) for part in self.passes[:3])
        if self.shape.ragged:
            return PaddedBatch(x, y, weight)
        size = self.shape.sizes[step % self.shape.steps]
        return Batch(x[:size], y[:size])


class CohortData:
    """`LocalData` of one client of a cohort, inside `torch.vmap`."""

    def __init__(self, batches: CohortBatches, slot: Tensor) -> None:
        self._batches, self._slot = batches, slot
        assert batches.numbers is not None
        self.client = _row(batches.numbers, slot)
        self.num_examples: Any = batches.examples[0] if batches.counts is None else _row(batches.counts, slot)[0]

    def epochs(self, count: Amount, phase: int = 0) -> Any:
        return StepsOf(self._batches, self._batches.take(count, phase), self._slot)

    def pairs(self, count: Amount, phase: int = 0) -> Any:
        return StepsOf(self._batches, self._batches.take(count, phase), self._slot, pairs=True)

    def first_batch(self, phase: int = 0) -> Any:
        return self.epochs(1, phase).batch(0)

    def steps(self, count: Amount) -> Any:
        counts = self._batches.counts
        return count_batches(count, self._batches.shape.steps if counts is None else _row(counts, self._slot)[1])
