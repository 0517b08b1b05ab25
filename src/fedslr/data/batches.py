"""Seeded batches: every engine sees the same batches, and a resumed run repeats them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from fedslr.core import seeds
from fedslr.core.types import Amount, Batch, Steps, count_batches
from fedslr.data.augment import flip_and_crop
from fedslr.data.normalization import Normalization, inputs

EVALUATION_ROUND = 2**31
"""The round number that seeds the batches of personal models that train when they are evaluated."""


class ShuffledData:
    """The batches of a client's training data (a `LocalData`).

    Every epoch is a new seeded shuffle, cut into consecutive batches; the last batch may be short. 8-bit images are
    normalised an epoch at a time, then flipped and cropped.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        seed: int,
        round: int,
        client: int,
        crop_padding: int = 0,
        normalization: Normalization | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_examples, self.client = len(y), client
        self._x, self._y = x, y
        self._batch_size = batch_size
        self._crop_padding = crop_padding
        self._normalization, self._dtype = normalization, dtype
        self._key = (seed, round, client)

    def epochs(self, count: Amount, phase: int = 0) -> Iterator[Batch]:
        batches = (batch for epoch in self._epochs(count, phase) for batch in epoch)
        return islice(batches, self.steps(count))

    def pairs(self, count: Amount, phase: int = 0) -> Iterator[tuple[Batch, Batch]]:
        return islice(self._pairs(count, phase), self.steps(count))

    def _pairs(self, count: Amount, phase: int) -> Iterator[tuple[Batch, Batch]]:
        for epoch in self._epochs(count, phase):
            batches = list(epoch)
            yield from zip(batches, batches[1:] + batches[:1], strict=True)

    def first_batch(self, phase: int = 0) -> Batch:
        return next(self.epochs(1, phase))

    def steps(self, count: Amount) -> int:
        return int(count_batches(count, -(-self.num_examples // self._batch_size)))

    def _epochs(self, count: Amount, phase: int) -> Iterator[Iterator[Batch]]:
        rng = seeds.generator(seeds.SHUFFLE, *self._key, phase)
        for _ in range(-(-count.number // self.steps(1)) if isinstance(count, Steps) else count):
            shuffle = torch.from_numpy(rng.permutation(self.num_examples)).to(self._y.device)
            x = inputs(self._x.index_select(0, shuffle), self._normalization, self._dtype)
            if self._crop_padding:
                x = flip_and_crop(x, self._crop_padding, rng)
            yield self._cut(x, self._y[shuffle])

    def _cut(self, x: Tensor, y: Tensor) -> Iterator[Batch]:
        for start in range(0, self.num_examples, self._batch_size):
            yield Batch(x[start : start + self._batch_size], y[start : start + self._batch_size])
