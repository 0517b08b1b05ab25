"""The training of one cohort: send, train, receive, book; then the server's turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from fedslr.channel.layout import Size
from fedslr.core import tree
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.group import Group
from fedslr.core.types import Payload, Round
from fedslr.engine.eager import Eager
from fedslr.engine.results import Diverged, PendingSizes, Result
from fedslr.engine.roster import Cohort
from fedslr.engine.run_state import NextRound, RunState
from fedslr.engine.settings import Settings
from fedslr.engine.workload import Member

LARGE_INPUT = 1000.0
"""If a client diverges whose inputs exceed this, the message suggests to scale them."""


class Trained(NamedTuple):
    """A trained cohort."""

    server_turn: Callable[[], NextRound]
    """Returns the server's next state and its broadcast. On a GPU the work has begun while clients personalise."""
    down: Size
    """The size of all messages to clients together."""
    up: Size
    """The size of all uploads together."""


class CohortTraining:
    """Trains one cohort after another with an engine."""

    def __init__(self, state: RunState, engine: Eager, settings: Settings, group: Group) -> None:
        self.state, self.engine, self.settings, self.group = state, engine, settings, group
        self._expected: Mapping[int, Member] = {}
        """The members of the next cohort that the engine has read already."""

    def train(self, mine: list[int], coming: list[int], now: Round) -> Trained:
        """Train the clients of this process.

        Args:
            mine: The sampled clients that live in this process.
            coming: The sampled clients of the next round; their states are read ahead.
            now: The round.
        """
        state, delivery = self.state, self.state.delivery
        state.store.prefetch(coming)
        # Each client is sent its message when the engine reads it from the cohort.
        cohort = Cohort(mine, state.roster, payload_of=delivery.send, known=self._expected)
        uploads, pending = _Uploads(state), []
        server_turn: Callable[[], NextRound] = partial(self._aggregate, uploads, now)
        for result in self.engine.train(cohort, now) if mine else ():
            is_last = result.numbers[-1] == mine[-1]
            if is_last:
                server_turn = self._begin_server_turn(uploads, result, now)
            else:
                uploads.add(result)
            pending.append(self._receive(result, now))
        next_round = self.settings.round(now.number + 1)
        self._expected = self.engine.prepare_next(coming, state.roster.member, next_round) if coming else {}
        with self._naming_client(now):
            # Here a GPU is waited for. Clients are checked before the server, so that a diverged one is named.
            up = [size for read in pending for size in read()]
        down = [delivery.sizes[number] for number in mine]
        counts = self.group.add_counts([*_total(down), *_total(up)])
        return Trained(server_turn, Size(*counts[:2]), Size(*counts[2:]))

    def _begin_server_turn(self, uploads: _Uploads, last: Result, now: Round) -> Callable[[], NextRound]:
        """Let the server add the last uploads and aggregate. A GPU does this while clients still personalise."""

        def work() -> NextRound:
            uploads.add(last)
            return self._aggregate(uploads, now)

        return self.engine.start_server_work(work) if self.group.size == 1 else work

    def _aggregate(self, uploads: _Uploads, now: Round) -> NextRound:
        """Return the server's next state and its broadcast."""
        mean = uploads.mean
        mean.sum, mean.weight = self.group.sum(mean.sum, mean.weight, self.state.work.device)
        return self.state.next_round(mean, uploads.each, now)

    def _receive(self, result: Result, now: Round) -> PendingSizes:
        """Book the uploads of some clients; return a function that gives their sizes."""
        with self._naming_client(now):
            read = result.measure()
            try:
                self._book(result, now)
            except WireError:  # Files cannot hold NaN. Reading the sizes names the client that diverged.
                read()
                raise
        return read

    def _book(self, result: Result, now: Round) -> None:
        """Book the uploads in the ledgers of their clients, and store the clients."""
        members = result.booked(self.state.algorithm, [1.0] * len(result.numbers), now)
        for slot, (number, member) in enumerate(zip(result.numbers, members, strict=True)):
            local = None
            if self.settings.diagnostics:
                local = tree.add(self.state.delivery.decoded(number, member), result.upload_of(slot))
            self.state.roster.put(number, member, now.number + 1, local)

    @contextmanager
    def _naming_client(self, now: Round) -> Iterator[None]:
        """Report a diverged client and suggest a remedy."""
        try:
            yield
        except Diverged as error:
            x = self.state.federation.inputs(self.state.federation.clients[error.number].x)
            largest = float(x.abs().max()) if x.is_floating_point() else 0.0
            scale = f", or inputs of a smaller scale (its largest is {largest:.3g})" if largest > LARGE_INPUT else ""
            raise FedslrError(
                f"round {now.number + 1}, client {error.number}: training diverged: {error}; "
                f"a lower lr helps (now {now.lr:g}){scale}"
            ) from error


class _Uploads:
    """The uploads of a round, added up; every upload counts in full."""

    def __init__(self, state: RunState) -> None:
        self._weights, self._keep_each = state.weights, state.algorithm.server_sees == "each"
        self.mean = tree.Mean()
        self.each: dict[int, Payload] = {}
        """The upload of every client, for a method whose server must see each."""

    def add(self, result: Result) -> None:
        weights = [self._weights[number] for number in result.numbers]
        self.mean.add_sum(result.weighted_sum(weights), sum(weights))
        if self._keep_each:
            self.each |= {number: result.upload_of(slot) for slot, number in enumerate(result.numbers)}


def _total(sizes: list[Size]) -> Size:
    return Size(sum(size.bytes for size in sizes), sum(size.numbers for size in sizes))
