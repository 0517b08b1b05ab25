"""A run before its first round: its model, data, clients, engine and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fedslr.channel.model_size import Sizes
from fedslr.channel.transport import Encoded, Measured
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.group import Group
from fedslr.core.types import Loss, Params
from fedslr.data.federation import Federation
from fedslr.engine import evaluation, fingerprints, selection, setup
from fedslr.engine.advice import Adviser
from fedslr.engine.run_state import RunState
from fedslr.engine.saving import Saving, load_models
from fedslr.engine.settings import Settings
from fedslr.engine.training import CohortTraining
from fedslr.storage.checkpoint import Checkpoints
from fedslr.storage.client_store import ClientStore, temporary_store
from fedslr.storage.record import PHASES
from fedslr.storage.run_folder import RunFolder
from fedslr.storage.statistics import ACCURACY


class PreparedRun:
    """A federation that is ready to train in this process, or in several."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any, Any],
        federation: Federation,
        model: str | nn.Module,
        settings: Settings,
        folder: RunFolder | None = None,
        loss: Loss | None = None,
        warn: Callable[[str], None] = lambda text: None,
        select: selection.Select | None = None,
        group: Group | None = None,
    ) -> None:
        self.algorithm, self.federation, self.settings = algorithm, federation, settings
        self.folder, self.warn, self.group = folder, warn, group or Group()
        self.num_clients = len(federation.clients)
        self.select = select or selection.find(settings.selection)
        work = setup.workload(algorithm, federation, model, settings, loss=loss, group=self.group, warn=warn)
        self.examples = work.examples
        headline = work.scorer.headline.name
        self.metric = None if headline == ACCURACY.name else headline
        """The headline metric in records, unless it is accuracy."""
        self.evaluated = selection.evaluated(settings.evaluate_clients, self.num_clients, settings.seed)

        self.problem, self.device = work.problem, work.device
        self.engine = setup.choose_engine(settings, work, warn)
        transport = Measured() if self.device.type == "cuda" else Encoded()
        checkpoints = None if folder is None else Checkpoints(folder.path / "checkpoint", self.group)
        if checkpoints is None:
            store = temporary_store(self, self.device, settings.memory_bytes())
        else:
            store = ClientStore(checkpoints.clients, self.device, settings.memory_bytes())
        self.store = store
        self.state = RunState(work, federation, transport, store)
        self.adviser = Adviser(algorithm, self.state.start, settings, warn)
        self.training = CohortTraining(self.state, self.engine, settings, self.group)
        self.saving: Saving | None = None
        if folder is not None and checkpoints is not None:
            self.saving = Saving(
                self.state,
                settings,
                self.functions,
                folder=folder,
                checkpoints=checkpoints,
                group=self.group,
                warn=warn,
            )
        if self.group.size > 1:
            self._require_shareable()
        self.seconds = dict.fromkeys((*PHASES, "checkpoint"), 0.0)

    def _require_shareable(self) -> None:
        """Refuse more processes than clients, and processes that were given different runs."""
        if self.group.size > self.num_clients:
            raise FedslrError(
                f"torchrun: {self.group.size} processes for {self.num_clients} clients; expected at most one for each"
            )
        start = fingerprints.of_params(self.state.start)
        mine = (self.state.digests, start, repr(self.algorithm), repr(self.settings))
        if any(other != mine for other in self.group.gather(mine)):
            raise FedslrError("torchrun: the processes were given different data, models or settings; seed them alike")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to a phase."""
        begun = perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[phase] += perf_counter() - begun

    # --- what was made ------------------------------------------------------------------------------------------------

    @property
    def functions(self) -> dict[str, str]:
        """The names of what a run was given that no file can hold."""
        given = {"algorithm": type(self.algorithm), "loss": self.problem.loss_function, "selection": self.select}
        return {name: fingerprints.function_name(thing) for name, thing in given.items()}

    @property
    def architecture(self) -> str:
        """The digest of the model's layers and shapes, whatever its trained weights are."""
        return fingerprints.of_model(self.problem.model)

    def sizes(self) -> Sizes:
        """Return the parameters of the dense, the global and the personal models."""
        return evaluation.sizes(self.state, self.group, self.evaluated)

    def personal_params(self, number: int) -> Params:
        """Return the parameters of one client's personal model."""
        member = self.state.roster.member(number)
        return self.engine.personal_model(number, member, self.state.delivery.decoded(number, member))

    # --- checkpoint and resume ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint, unless this round has one."""
        if self.saving is not None:
            with self.timed("checkpoint"):
                self.saving.save(self.seconds)

    def begin(self) -> None:
        """Start in a clean folder."""
        if self.saving is not None:
            self.saving.begin()

    def resume(self) -> None:
        """Go back to the last finished round on the disk, or begin if there is none."""
        if self.saving is None:
            raise FedslrError("resume: there is no run folder to resume from; give one with out")
        self.seconds |= self.saving.resume()

    def load_models(self, folder: Path) -> None:
        """Take the models that the newest checkpoint of a run folder holds. Nothing there is changed."""
        self.seconds |= load_models(self.state, folder, self.warn)
