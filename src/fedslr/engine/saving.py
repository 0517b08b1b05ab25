"""Saving a run to its folder, and going back to the last round that was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from fedslr.core import factored
from fedslr.core.errors import CheckpointError, FedslrError
from fedslr.core.group import Group
from fedslr.core.states import plain, restore
from fedslr.engine.aggregation import ServerState, first_server_state
from fedslr.engine.run_state import RunState
from fedslr.engine.settings import Settings
from fedslr.storage.checkpoint import NO_CHECKPOINT, Checkpoints, Generation, require_checkpoint
from fedslr.storage.run_folder import RunFolder


class Saving:
    """The checkpoints of one run."""

    def __init__(
        self,
        run: RunState,
        settings: Settings,
        functions: Mapping[str, str],
        *,
        folder: RunFolder,
        checkpoints: Checkpoints,
        group: Group,
        warn: Callable[[str], None],
    ) -> None:
        self.run, self.settings, self.functions = run, settings, dict(functions)
        self.folder, self.checkpoints, self.group, self.warn = folder, checkpoints, group, warn
        self._saved, self._saved_at = 0, monotonic()
        self._held_back = False
        """Whether a checkpoint waits for `checkpoint_minutes`."""

    def save(self, seconds: Mapping[str, float]) -> None:
        """Write a checkpoint, unless this round has one."""
        run = self.run
        if self._saved == run.done:
            return
        notes = {**run.digests, "metrics": self.folder.sync(), "seconds": dict(seconds), "functions": self.functions}
        server = {
            "server": plain(run.server_state.server),
            "ledger": plain(run.server_state.mean_ledger),
            "moments": run.server_state.moments,
            "start": run.start,
        }
        self.checkpoints.save(run.done, server, run.store, notes)
        self._saved, self._saved_at = run.done, monotonic()

    def is_due(self) -> bool:
        """Return whether this round is to be saved: the last one, or one that the settings ask for.

        If `checkpoint_minutes` holds back a checkpoint, the next round after that time is saved. Several processes use
        the clock of the first.
        """
        minutes, done = self.settings.checkpoint_minutes, self.run.done
        if done == self.settings.rounds:
            return True
        if done % self.settings.checkpoint_every != 0 and not self._held_back:
            return False
        self._held_back = bool(minutes) and self.group.from_first(lambda: monotonic() - self._saved_at < 60 * minutes)
        return not self._held_back

    def begin(self) -> None:
        """Start in a clean folder: drop what an earlier attempt left before its first checkpoint."""
        self.folder.rewind(None)
        self.run.store.load({}, set(), self.group.mine)
        self.group.wait()

    def resume(self) -> Mapping[str, float]:
        """Go back to the last round on the disk, or begin; return the seconds spent by phase until then."""
        found = self.checkpoints.load(self.warn)
        if found is None:
            if (self.folder.path / "summary.json").exists():
                raise CheckpointError(
                    f"{self.folder.path}: this run is finished, but its checkpoint/ is missing, so it cannot go on; "
                    "choose another --out"
                )
            if self.folder.has_lines():
                self.warn(f"{self.folder.path} has no checkpoint: this run starts again from the first round")
            self.begin()
            return {}
        generation, kept = found
        if generation.rounds > self.settings.rounds:
            had = generation.rounds
            raise FedslrError(
                f"rounds: got {self.settings.rounds}, but the run already has {had}; ask for {had} or more"
            )
        for name, before in generation.notes["functions"].items():
            if before != self.functions[name]:
                self.warn(f"resume: {name} is {self.functions[name]}, but the run began with {before}")
        go_back(self.run, generation, kept)
        self._saved = generation.rounds
        self.folder.rewind(generation.notes["metrics"])
        self.checkpoints.restore(self.run.store, generation)
        return dict(generation.notes["seconds"])


def load_models(run: RunState, folder: Path, warn: Callable[[str], None]) -> Mapping[str, float]:
    """Take the models of a run folder's newest checkpoint; return its seconds. Nothing in the folder changes."""
    checkpoints = Checkpoints(require_checkpoint(folder))
    found = checkpoints.load(warn, clients=False)
    if found is None:
        raise CheckpointError(NO_CHECKPOINT.format(folder))
    generation, kept = found
    run.store.folder, run.store.entries = checkpoints.clients, dict(generation.clients)
    go_back(run, generation, kept)
    return dict(generation.notes["seconds"])


def go_back(run: RunState, generation: Generation, kept: dict[str, Any]) -> None:
    """Give a run the server of a checkpoint; refuse one of other data or another model."""
    if generation.notes["data"] != run.digests["data"]:
        raise CheckpointError(
            "the data are not the ones this run began with; restore them, or begin another run in another folder"
        )
    if generation.notes["model"] != run.digests["model"]:
        raise CheckpointError("the model is not the one this run began with; restore it, or begin another run")
    kept = factored.to_device(kept, run.work.device)
    first = first_server_state(run.algorithm, kept["start"])
    server_state = ServerState(
        restore(first.server, kept["server"]), restore(first.mean_ledger, kept["ledger"]), kept.get("moments", {})
    )
    run.start_from(kept["start"], server_state, generation.rounds)
