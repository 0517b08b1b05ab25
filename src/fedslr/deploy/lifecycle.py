"""The beginning and the end of a server: it opens a run folder, begins or resumes the run, and writes the results."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedslr.core import factored
from fedslr.core.errors import FedslrError, TakenError
from fedslr.core.matrix import full_ranks
from fedslr.data.node_data import NODE_DATASET
from fedslr.deploy import options
from fedslr.deploy.accounts import to_tree
from fedslr.deploy.database import Database, open_database
from fedslr.deploy.exchange import Post
from fedslr.deploy.options import Deployment
from fedslr.deploy.server import Coordinator
from fedslr.engine import contract, selection
from fedslr.engine.aggregation import first_server_state
from fedslr.report.html_report import write_report
from fedslr.run.folders import difference, planner_of
from fedslr.run.summary import Figures, summarize
from fedslr.storage.run_folder import RunFolder

FAILURE_FILE = "failure.txt"
"""In the run folder: why the last start of the server ended before the run did."""
TAKEOVER_SECONDS = 60.0
"""A new server waits so long for the one before it to leave the run folder."""


def open_coordinator(
    path: Path, asked: Deployment | None, post: Post, patience: float = 0.0, **given: Any
) -> Coordinator:
    """Return the server of a run folder.

    Args:
        path: The run folder.
        asked: The request; None to resume the one in the folder.
        post: The carrier of the messages.
        patience: The seconds to wait for another server to leave the folder.
        given: Arguments of `Coordinator`.
    """
    with open_database(path) as kept:
        if asked is None and kept is None:
            raise FedslrError(f"resume: {path} holds no federation to resume")
    folder = _taken_over(path, patience, given.get("say", lambda text: None))
    try:
        database = Database(path)
        asked = asked or options.from_text(database.fact("recipe"))
        select = selection.find(asked.recipe.settings.selection)
        if database.exists:
            require_same_federation(database, asked, path)
            database.note("recipe", asked.to_toml())
        else:
            _begin(database, asked)
        return Coordinator(folder, database, asked, post, select, **given)
    except BaseException:
        folder.close()
        raise


def _begin(database: Database, asked: Deployment) -> None:
    """Write the initial model and the server's first state."""
    start, method = asked.problem().params(), asked.recipe.algorithm
    state = first_server_state(method, contract.private_copy(start))
    contract.require_state("init_server", state.server)
    contract.require_state("init_client", method.init_client(contract.private_copy(start)))
    start, server = (factored.to_device(x, "cpu") for x in (start, to_tree(state)))
    database.create(secrets.token_hex(8), asked.to_toml(), start, server)


def require_same_federation(database: Database, asked: Deployment, path: Path) -> None:
    """Refuse to resume a run with a request that would have changed a finished round."""
    kept = options.from_text(database.fact("recipe"))
    planner, done = planner_of(kept.recipe.algorithm, kept.recipe.settings), database.fact("done")
    if asked.recipe.settings.rounds < done:
        raise FedslrError(f"rounds: got {asked.recipe.settings.rounds}, but {done} are done in {path}")
    changed = difference(kept.recipe.to_toml(), asked.recipe.to_toml(), planner)
    if (kept.options.shape, kept.options.classes) != (asked.options.shape, asked.options.classes):
        changed = "inputs or classes changed"
    if changed:
        raise FedslrError(f"resume: this is not the run in {path}: {changed}; choose another folder")


def _taken_over(path: Path, patience: float, say: Callable[[str], None]) -> RunFolder:
    """Return a run folder as soon as the server before has left it, which may take some seconds."""
    until, warned = time.monotonic() + patience, False
    while True:
        try:
            return RunFolder(path)
        except TakenError:
            if time.monotonic() >= until:
                raise
        if not warned:
            say(f"another server is still in {path}; waiting up to {patience:g} seconds for it to end")
        warned = True
        time.sleep(0.2)


def finish(coordinator: Coordinator) -> dict[str, Any]:
    """Write the summary and the report of a finished federation; return the summary."""
    records, asked = coordinator.database.records(), coordinator.asked
    run = Figures(
        asked.recipe.algorithm.name,
        NODE_DATASET,
        len(coordinator.accounts.members),
        coordinator.done,
        asked.recipe.settings.seed,
        coordinator.sizes(),
        coordinator.seconds,
        full_ranks(coordinator.accounts.start),
        coordinator.exchange.scorer.metrics,
    )
    summary = summarize(run, records, rerunnable=False)
    coordinator.folder.write_summary(summary)
    write_report([coordinator.folder.path], coordinator.folder.path / "report.html")
    return summary
