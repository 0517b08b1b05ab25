"""The result of a run: its figures, its models and its folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedslr.core.errors import FedslrError, FedslrWarning
from fedslr.data.federation import Federation
from fedslr.engine.rounds import Simulation
from fedslr.report import paper_figures
from fedslr.report.result_tables import Table
from fedslr.report.run_facts import run_facts
from fedslr.report.saved_runs import Run, finished_run
from fedslr.report.table_formats import html
from fedslr.run import result_frames
from fedslr.run.trained import TrainedModels, known_clients
from fedslr.storage.statistics import ACCURACY, Headline, headline_of
from fedslr.tasks.scoring import Scorer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Result(TrainedModels):
    """The figures, the models (see `TrainedModels`) and, if one was asked for, the folder of a run.

    Attributes:
        summary: The figures of the run, as `summary.json` holds them.
        records: A dictionary per round, as the lines of `metrics.jsonl` hold them.
        recipe: The settings of the run, as the text of `config.toml`.
        out: The folder of the run, or None.
    """

    def __init__(
        self,
        simulation: Simulation,
        records: list[dict[str, Any]],
        summary: dict[str, Any],
        recipe: str,
        out: Path | None = None,
    ) -> None:
        super().__init__(simulation)
        self.records = records
        self.summary = summary
        self.recipe = recipe
        self.out = simulation.folder.path if simulation.folder else out

    def __repr__(self) -> str:
        metric = self.headline
        score = self.summary[metric.name]
        return (
            f"<{self._title()}: {'' if metric == ACCURACY else metric.words + ' '}"
            f"personal models {metric.text(score['personal'])}, global model {metric.text(score['global'])}>"
        )

    def _title(self) -> str:
        return f"{self.summary['algorithm']} on {self.summary['dataset']}, {self.summary['rounds']} rounds"

    @property
    def headline(self) -> Headline:
        """The metric that stands for the others, with its direction."""
        return headline_of(self.summary)

    @property
    def scorer(self) -> Scorer:
        """The losses and metrics of the run's evaluations."""
        return self._simulation.state.work.scorer

    def _repr_html_(self) -> str:
        """Return the main figures as a table for notebooks."""
        width = self._simulation.settings.torch_dtype().itemsize
        rows = [list(row) for row in run_facts(self.summary, self.records, self.headline, width)]
        return html(Table(["", "", ""], rows, 1), self._title())

    def to_frame(self) -> DataFrame:
        """Return the figures of every round as a pandas table with one row per round.

        The columns are those fields of `records` that belong to no single client. Rounds without an evaluation have no
        accuracies and no sizes. `parameters_personal` is the mean over clients and `rank` the sum over layers.

        Raises:
            FedslrError: pandas is not installed.

        Example:
            result.to_frame()["accuracy_personal"].dropna().plot()
        """
        return result_frames.rounds_frame(self.records)

    def clients_frame(self) -> DataFrame:
        """Return a pandas table with one row per client.

        The columns are its name, its training samples, every loss and metric of the global and of its personal model,
        and the parameters of its personal model, all of the last evaluation.

        Raises:
            FedslrError: pandas is not installed.

        Example:
            result.clients_frame().sort_values("accuracy_personal").head()
        """
        return result_frames.clients_frame(self.as_run(), self._simulation.examples, self.federation.client_names)

    def plot(self) -> Figure:
        """Return a matplotlib figure of the headline metric and the model sizes over rounds.

        Example:
            result.plot().savefig("fedslr.pdf")
        """
        return paper_figures.one_run(self.as_run())

    def as_run(self) -> Run:
        """Return this result as tables and figures read it from a folder."""
        return finished_run(self.out or Path(self.summary["algorithm"]), self.recipe, self.summary, self.records)


def find_client(text: str, federation: Federation | None = None) -> int:
    """Return the number of a client that a command names by its number, or by its name, which may be a number too."""
    names = list(federation.client_names or ()) if federation else []
    number = int(text) if text.isdecimal() else None
    named = names.index(text) if text in names else None
    if number is None or (named is not None and number >= len(names)):
        number = named
    if number is None or (federation and number >= len(federation.clients)):
        known = len(federation.clients) if federation else None
        got = f"'{text}'" if number is None else text
        raise FedslrError(f"--client: got {got}, expected {known_clients(text, known, names)}")
    if named not in (None, number):
        chosen = f"--client {text}: taken as a number; the client of that name is client {named}"
        warnings.warn(chosen, FedslrWarning, stacklevel=2)
    return number
