"""The training of one cohort: send, train, receive, book; then the server's turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fedslr.channel.layout import Size
from fedslr.core import tree
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.group import Group
from fedslr.core.types import Payload, Round
from fedslr.engine.aggregation import book
from fedslr.engine.results import Diverged, Engine, Result
from fedslr.engine.roster import Lazy
from fedslr.engine.run_state import NextRound, RunState
from fedslr.engine.settings import Settings
from fedslr.engine.workload import Member
from fedslr.storage.record import Record

TRAFFIC = ("bytes_down", "bytes_up", "numbers_down", "numbers_up")
LARGE_INPUT = 1000.0
"""If a client diverges whose inputs exceed this, the message suggests to scale them."""


class CohortTraining:
    """Trains one cohort after another with an engine."""

    def __init__(self, state: RunState, engine: Engine, settings: Settings, group: Group) -> None:
        self.state, self.engine, self.settings, self.group = state, engine, settings, group
        self._booking = functools.partial(book, state.algorithm)
        self._expected: Sequence[Member] | None = None
        """The members of the next cohort, if the engine was told of them."""

    def train(self, mine: list[int], coming: list[int], now: Round, record: Record) -> Callable[[], NextRound]:
        """Train the clients of this process; return the function that gives the server's next state.

        Args:
            mine: The sampled clients that live in this process.
            coming: The sampled clients of the next round; their states are read ahead.
            now: The round.
            record: Takes the size of every message.
        """
        state = self.state
        state.store.prefetch(coming)
        members, self._expected = self._expected or state.roster.members(mine), None
        down: dict[int, Size] = {}
        payloads = Lazy(len(mine), lambda i: self._send(mine[i], members[i], down))
        received = _Uploads(state, keep_each=state.algorithm.server_sees == "each")
        aggregate: Callable[[], NextRound] = functools.partial(self._aggregate, received, now)
        readings: list[tuple[list[int], Callable[[], list[Size]]]] = []
        seen = 0
        for result in self.engine.train(mine, members, payloads, now) if mine else ():
            numbers = mine[seen : seen + result.size]
            seen += result.size
            received.add(numbers, result)
            if seen == len(mine) and self.group.size == 1:
                aggregate = self.engine.meanwhile(aggregate)
            with self._naming_client(now, numbers):
                readings.append((numbers, result.survey(state.transport)))
            try:
                self._book(numbers, result, now)
            except WireError:  # the disk refuses values that are not finite: name the client that diverged
                self._read(now, numbers, readings[-1][1])
                raise
        if self.engine.looks_ahead and coming:
            self._expected = list(state.roster.members(coming))
            self.engine.expect(coming, self._expected, self.settings.round(now.number + 1))
        # Here a GPU is waited for. Clients are checked before the server, so that a diverged one is named.
        up = [size for numbers, read in readings for size in self._read(now, numbers, read)]
        self._count_traffic(record, list(down.values()), up)
        return aggregate

    def _send(self, number: int, member: Member, down: dict[int, Size]) -> Payload:
        down[number], payload = self.state.delivery.send(number, member)
        return payload

    def _aggregate(self, received: _Uploads, now: Round) -> NextRound:
        """Return the server's next state and its broadcast."""
        mean = received.mean()
        mean.sum, mean.weight = self.group.sum(mean.sum, mean.weight, self.state.work.device)
        return self.state.next_round(mean, received.each, now)

    def _book(self, numbers: list[int], result: Result, now: Round) -> None:
        """Book the uploads in the ledgers of their clients, and keep the clients."""
        members = result.booked(self._booking, [1.0] * result.size, now)
        for slot, (number, member) in enumerate(zip(numbers, members, strict=True)):
            local = None
            if self.settings.diagnostics:
                local = tree.add(self.state.delivery.payload(number, member), result.upload(slot))
            self.state.roster.put(number, member, now.number + 1, local)

    def _read(self, now: Round, numbers: list[int], read: Callable[[], list[Size]]) -> list[Size]:
        with self._naming_client(now, numbers):
            return read()

    def _count_traffic(self, record: Record, down: list[Size], up: list[Size]) -> None:
        """Record what all clients of the round received and sent."""
        for size in down:
            record.count_down(size)
        for size in up:
            record.count_up(size)
        counts = self.group.add_counts([getattr(record, name) for name in TRAFFIC])
        for name, count in zip(TRAFFIC, counts, strict=True):
            setattr(record, name, count)

    @contextmanager
    def _naming_client(self, now: Round, numbers: list[int]) -> Iterator[None]:
        """Report a diverged client with what may help."""
        try:
            yield
        except Diverged as error:
            number = numbers[error.slot]
            x = self.state.federation.inputs(self.state.federation.clients[number].x)
            largest = float(x.abs().max()) if x.is_floating_point() else 0.0
            scale = f", or inputs of a smaller scale (its largest is {largest:.3g})" if largest > LARGE_INPUT else ""
            raise FedslrError(
                f"round {now.number + 1}, client {number}: training diverged: {error}; "
                f"a lower lr helps (now {now.lr:g}){scale}"
            ) from error


class _Uploads:
    """The uploads of a round, added up; every upload counts in full.

    The last result is added when the mean is asked for: the server may do that beside clients that still personalise.
    """

    def __init__(self, state: RunState, keep_each: bool) -> None:
        self._state, self._keep_each = state, keep_each
        self._mean = tree.Mean()
        self._last: tuple[list[int], Result] | None = None
        self.each: dict[int, Payload] = {}
        """The upload of every client, for a method whose server must see each."""

    def add(self, numbers: list[int], result: Result) -> None:
        self._settle()
        self._last = (numbers, result)

    def mean(self) -> tree.Mean:
        self._settle()
        return self._mean

    def _settle(self) -> None:
        if self._last is None:
            return
        (numbers, result), self._last = self._last, None
        weights = [self._state.weights[n] for n in numbers]
        self._mean.add_sum(result.weighted_sum(weights), sum(weights))
        if self._keep_each:
            self.each.update({n: result.upload(slot) for slot, n in enumerate(numbers)})
