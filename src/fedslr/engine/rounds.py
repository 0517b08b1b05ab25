"""The loop of a run: sample, send, train, receive, book, aggregate, evaluate, record, checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from fedslr.core.types import Round
from fedslr.engine import evaluation, selection
from fedslr.engine.aggregation import noting_divergence
from fedslr.engine.preparation import PreparedRun
from fedslr.storage.record import Record


class Simulation(PreparedRun):
    """A federation that trains in this process, or in several. Every byte that would travel is counted."""

    _warned_of_theory = False

    def rounds(self) -> Iterator[Record]:
        """Run what is left of the run; yield the record of every finished round."""
        sampled = self._cohort(self.state.done)
        while self.state.done < self.settings.rounds:
            coming = self._cohort(self.state.done + 1)
            yield self._round(sampled, coming)
            sampled = coming
        self.store.flush()

    def _cohort(self, number: int) -> list[int]:
        """Return the clients of a round; none after the last round."""
        if number >= self.settings.rounds:
            return []
        size = self.settings.cohort_size(self.num_clients)
        return selection.draw(self.select, size, self.examples, self.settings.seed, number)

    def _round(self, sampled: list[int], coming: list[int]) -> Record:
        """Run one round. Its broadcast was made with the server's state, at the end of the round before."""
        now, before = self.settings.round(self.state.done), dict(self.seconds)
        record = Record(round=now.number + 1, lr=now.lr, clients=sampled, metric=self.metric)
        with self.timed("train"):  # send, train, receive, book
            trained = self.training.train(self.group.mine(sampled), self.group.mine(coming), now)
        record.count_down(trained.down)
        record.count_up(trained.up)
        with self.timed("aggregate"), noting_divergence(now.number):
            self.state.advance(trained.server_turn())
        record.rank = self.state.delivery.ranks()
        if self.settings.is_evaluated(self.state.done):
            with self.timed("evaluate"):
                self._evaluate(now, record)
        record.count_seconds(self.seconds, before)
        if self.folder is not None:
            self.folder.append(record)
        if self.saving is not None and self.saving.is_due():
            self.save()
        return record

    def _evaluate(self, now: Round, record: Record) -> None:
        found = evaluation.evaluate(self.state, self.engine, self.group, self.evaluated)
        record.add_evaluation(found, self.evaluated if self.settings.evaluate_clients else None)
        record.add_sizes(self.sizes())
        self.adviser.look_at(record)
        if self.settings.diagnostics:
            diagnosis = evaluation.diagnose(self.state, self.engine, now)
            record.diagnostics = diagnosis.figures
            if diagnosis.warning and not self._warned_of_theory:
                self._warned_of_theory = True
                self.warn(diagnosis.warning)
