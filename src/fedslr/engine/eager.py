"""The plain engine: one client after another, ordinary PyTorch, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fedslr.core import seeds
from fedslr.core.algorithm import Algorithm
from fedslr.core.generators import seeded
from fedslr.core.problem import Task
from fedslr.core.types import Params, Payload, Round
from fedslr.data.batches import EVALUATION, ShuffledData
from fedslr.data.federation import ClientData
from fedslr.data.normalization import Normalization, inputs
from fedslr.engine import contract

CHUNK = 1024
"""Samples per forward pass of a model that does not train."""


class Eager:
    """Runs a method's functions as they are written."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        task: Task,
        clients: Sequence[ClientData],
        batch_size: int,
        seed: int,
        crop_padding: int = 0,
        normalization: Normalization | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.task = task
        self.clients = clients
        self.batch_size = batch_size
        self.seed = seed
        self.crop_padding = crop_padding
        self.normalization = normalization
        self.dtype = next(task.model.parameters()).dtype

    def _data(self, client: int, round: int) -> ShuffledData:
        held = self.clients[client]
        return ShuffledData(
            held.x,
            held.y,
            self.batch_size,
            self.seed,
            round,
            client,
            self.crop_padding,
            self.normalization,
            self.dtype,
        )

    def local_update(self, client: int, state: Any, payload: Payload, round: Round) -> tuple[Any, Payload]:
        """One client's work of a round."""
        with self.seeded(client, round.number):
            update = contract.checked_update(self.algorithm.local_update, type(state))
            data = self._data(client, round.number)
            return update(self.task, contract.own(state), contract.own(payload), data, round)

    def personal_model(self, client: int, state: Any, payload: Payload) -> Params:
        with self.seeded(client, EVALUATION):
            state, payload = contract.lent(self.algorithm, (state, payload))
            made = self.algorithm.personal_model(self.task, state, payload, self._data(client, EVALUATION))
        return contract.checked_model("personal_model", made, self.task.params())

    @contextmanager
    def seeded(self, client: int, round: int) -> Iterator[None]:
        """Dropout and its like draw from the round and the client, so a resumed run repeats them."""
        drawn = seeds.integer(seeds.NOISE, self.seed, round, client)
        with seeded(drawn, self.clients[client].y.device), torch.no_grad():
            yield

    @torch.no_grad()
    def accuracy(self, params: Params, clients: Sequence[int]) -> list[float | None]:
        """The share of right answers of one model on each client's test data; None for a client that has none."""
        held = [self.clients[c] for c in clients]
        x = torch.cat([h.x_test for h in held])
        y = torch.cat([h.y_test for h in held])
        if not len(y):
            return [None] * len(held)
        right = []
        for i in range(0, len(y), CHUNK):
            shown = inputs(x[i : i + CHUNK], self.normalization, self.dtype)
            right.append(self.task.outputs(params, shown).argmax(1) == y[i : i + CHUNK])
        parts = torch.split(torch.cat(right).cpu(), [len(h.y_test) for h in held])
        return [float(part.double().mean()) if len(part) else None for part in parts]
