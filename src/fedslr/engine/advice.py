"""Advice of a method on its hyperparameters, from the evaluations of a run."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from fedslr.core.algorithm import Algorithm, Progress
from fedslr.core.matrix import full_ranks
from fedslr.core.types import Params
from fedslr.engine.settings import Settings
from fedslr.storage.record import Record

MIN_ROUNDS = 10
"""Finished rounds before a method is asked for advice. In fewer rounds a model learns too little to be judged."""


class Adviser:
    """Shows a method the evaluations of its run, and passes the first advice on as a warning.

    Evaluations from before a resumption are not shown.
    """

    def __init__(
        self, algorithm: Algorithm[Any, Any, Any], start: Params, settings: Settings, warn: Callable[[str], None]
    ) -> None:
        self.algorithm, self.settings, self.warn = algorithm, settings, warn
        self._full_ranks = full_ranks(start)
        self._history: list[tuple[int, float]] = []
        self._advised = False

    def look_at(self, record: Record) -> None:
        """Warn if the method has advice after an evaluated round. A run is advised once."""
        value = record.score("global")
        if value is not None:
            self._history.append((record.round, value if record.headline.larger_is_better else -value))
        if self._advised or record.round < MIN_ROUNDS or not record.parameters_personal:
            return
        advice = self.algorithm.advise(self._progress(record, fmean(record.parameters_personal)))
        if advice is not None:
            self._advised = True
            self.warn(f"round {record.round}: {advice}")

    def _progress(self, record: Record, personal: float) -> Progress:
        return Progress(
            round=self.settings.round(record.round - 1),
            dense=record.parameters_dense or 0,
            shared=record.parameters_global or 0,
            personal=personal,
            ranks=record.rank,
            full_ranks=self._full_ranks,
            history=self._history,
        )
