"""The server of a deployed federation: it samples, asks, counts and commits. Nothing here knows Flower.

The server repeats a round until enough uploads came before its deadline. One transaction ends the round; before it,
nothing of the round exists. From then on every upload in it is counted for good, and the next order to its node says
so. The server checks every message before it counts. It refuses a wrong message, reports why, and goes on with the
other nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fedslr.channel.model_size import Sizes, parameters
from fedslr.core import seeds
from fedslr.core.errors import FedslrError
from fedslr.deploy.accounts import Accounts, to_tree
from fedslr.deploy.database import Database
from fedslr.deploy.exchange import Exchange, Post, Question, sender_name
from fedslr.deploy.messages import EVALUATE, TRAIN
from fedslr.deploy.options import Deployment
from fedslr.deploy.scores import LOSS_NAMES
from fedslr.engine import selection
from fedslr.engine.advice import Adviser
from fedslr.engine.aggregation import noting_divergence
from fedslr.engine.settings import DEFAULT_COHORT
from fedslr.storage.record import PHASES, Record
from fedslr.storage.run_folder import RunFolder
from fedslr.storage.statistics import ACCURACY, Evaluation
from fedslr.tasks.scoring import Scores


class Coordinator:
    """The server of a federation whose run folder is open."""

    def __init__(
        self,
        folder: RunFolder,
        database: Database,
        asked: Deployment,
        post: Post,
        select: selection.Select,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.database, self.asked, self.post, self.say = folder, database, asked, post, say
        self.options, self.settings, self.algorithm = asked.options, asked.recipe.settings, asked.recipe.algorithm
        self.select, self.run, self.done = select, str(database.fact("run")), int(database.fact("done"))
        self.accounts = Accounts(database, self.algorithm, self.settings.server_optimizer)
        self.adviser = Adviser(self.algorithm, self.accounts.start, self.settings, say)
        self.exchange = Exchange(self.accounts, asked, post, say, clock)
        self.seconds = {**dict.fromkeys(PHASES, 0.0), **(database.fact("seconds") or {})}
        name = self.exchange.scorer.headline.name
        self.metric = None if name == ACCURACY.name else name
        """The headline metric in records, unless it is accuracy."""
        self._restore_records()

    def _restore_records(self) -> None:
        """Write the records of the database to metrics.jsonl; the last record waits for its evaluation."""
        self.folder.write_config(self.asked.recipe.to_toml())
        self.folder.rewind(None)
        for record in self.database.records()[: self.done if self._is_evaluated() else self.done - 1]:
            self.folder.append(Record.read(record))

    def _is_evaluated(self) -> bool:
        return self.database.is_evaluated(self.done) or not self.settings.is_evaluated(self.done)

    def rounds(self) -> Iterator[Record]:
        """Run what is left of the run; yield the record of every finished round."""
        self.exchange.gather()
        if not self._is_evaluated():
            yield self._evaluate(Record.read(self.database.records()[-1]))
        while self.done < self.settings.rounds:
            self.exchange.greet()
            self.exchange.enrolment.change_members()
            record = self._round()
            yield self._evaluate(record) if self.settings.is_evaluated(self.done) else self._append(record)

    def _append(self, record: Record) -> Record:
        self.folder.append(record)
        return record

    # --- a round ------------------------------------------------------------------------------------------------------

    def _round(self) -> Record:
        before = dict(self.seconds)
        record = Record(round=self.done + 1, lr=self.settings.round(self.done).lr, clients=[], metric=self.metric)
        sampled = self._sample()
        size = len(sampled)
        for _ in range(self.options.attempts):
            # A later cohort is smaller than the first one only if clients leave.
            needed = self.options.needed(min(size, len(sampled)))
            with self._timed("train"):
                question = Question(TRAIN, self.done, self.database.next_attempt(), record)
                uploads = self.exchange.ask(question, sampled, enough=size).uploads
            if len(uploads) >= needed:
                return self._close(question, sampled, before)
            sampled = self._next_sample(sampled, len(sampled) - len(uploads))
            arrived = f"{len(uploads)} of {needed} necessary uploads arrived before the deadline"
            self.say(f"round {self.done + 1}: {arrived}; asking clients {sampled}")
        raise FedslrError(
            f"round {self.done + 1}: fewer than {needed} uploads arrived in {self.options.attempts} attempts from "
            f"clients {sampled}; see the log for the reason of each client, then resume"
        )

    def _sample(self) -> list[int]:
        numbers = list(self.accounts.members)
        size = min(self.settings.clients_per_round or DEFAULT_COHORT, len(numbers))
        examples = [m.examples for m in self.accounts.members.values()]
        return [numbers[i] for i in selection.draw(self.select, size, examples, self.settings.seed, self.done)]

    def _next_sample(self, sampled: list[int], missing: int) -> list[int]:
        """Return the clients for the next attempt: the same ones, and as many others as did not answer."""
        here, members = set(self.post.nodes()), self.database.members()
        stay = [n for n in self.accounts.members if n in members and not members[n].leaving]
        others = [n for n in stay if n not in sampled and members[n].identity in here]
        drawn = seeds.generator(seeds.COHORT, self.settings.seed, self.done, len(sampled)).permutation(len(others))
        chosen = {*sampled, *(others[i] for i in drawn[:missing])}
        return [n for n in stay if n in chosen] or sampled

    def _close(self, question: Question, sampled: list[int], before: Mapping[str, float]) -> Record:
        """Aggregate the uploads in the order of the cohort, and commit."""
        uploads = {c: question.uploads[c] for c in sampled if c in question.uploads}
        record, now = question.record, self.settings.round(self.done)
        with self._timed("aggregate"), noting_divergence(self.done, ", or set norm_bound"):
            state = self.accounts.close(uploads, now)
            counted = [self.accounts.counted(c, upload, now, question.attempt) for c, upload in uploads.items()]
        record.clients = list(uploads)
        record.missing = [c for c in sampled if c not in uploads] or None
        record.rank = self.accounts.broadcast_of(state).ranks()
        record.count_seconds(self.seconds, before)
        self.database.commit(self.done + 1, to_tree(state), counted, record.fields(), self.seconds)
        self.done += 1
        self.accounts.advance(state)
        self.database.forget_refusals(*(sender_name(c, self.accounts.members[c].identity or "") for c in uploads))
        return record

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self, record: Record) -> Record:
        """Test the personal and the global models on the data of the clients that can be reached."""
        numbers, before = list(self.accounts.members), {"evaluate": self.seconds["evaluate"]}
        chosen = selection.evaluated(self.settings.evaluate_clients, len(numbers), self.settings.seed)
        asked = [numbers[i] for i in chosen]
        with self._timed("evaluate"):
            answers = self.exchange.ask(Question(EVALUATE, self.done, 0, record), asked).evaluations
        found = [answers.get(c) for c in asked]
        missing: Scores = dict.fromkeys((*LOSS_NAMES, *(m.name for m in self.exchange.scorer.metrics)))
        shared = [missing if r is None or r.shared is None else r.shared for r in found]
        personal = [missing if r is None else r.personal for r in found]
        all_clients = asked == list(range(len(numbers)))
        evaluation = Evaluation(shared if self.algorithm.has_global_model else None, personal)
        record.add_evaluation(evaluation, None if all_clients else asked)
        record.add_sizes(self._sizes([r.parameters for r in found if r is not None]))
        self.adviser.look_at(record)
        record.count_seconds(self.seconds, before)
        self.database.save_evaluation(self.done, record.fields())
        return self._append(record)

    def sizes(self) -> Sizes:
        """Return the parameters of the dense, the global and the last evaluated personal models."""
        found = (record.get("parameters_personal") for record in reversed(self.database.records()))
        return self._sizes(next(filter(None, found), [0]))

    def _sizes(self, personal: list[int]) -> Sizes:
        dense = sum(x.numel() for x in self.accounts.start.values())
        return Sizes(dense, parameters(self.accounts.broadcast.shared()), personal)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begun
