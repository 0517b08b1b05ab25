"""Models of a deployed federation, for `export`: the global one from the server's ledger, a client's from its node."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedslr.core import factored
from fedslr.core.errors import FedslrError
from fedslr.core.types import Params, Payload
from fedslr.data.node_data import NODE_DATASET
from fedslr.data.normalization import UNIT
from fedslr.deploy import options
from fedslr.deploy.accounts import Accounts
from fedslr.deploy.database import open_database
from fedslr.deploy.messages import EIGHT_BIT, decode_parts
from fedslr.deploy.node_store import PAGE, NodeStore
from fedslr.export.layered_model import DEFAULT_BATCH, ModelOrigin, layered_model, made_up_inputs
from fedslr.storage.run_folder import FEDERATION_DATABASE
from fedslr.storage.statistics import headline


def is_store(folder: Path) -> bool:
    """Return whether a folder is a node's store."""
    return (folder / PAGE).exists()


def is_deployed(folder: Path) -> bool:
    """Return whether a folder is the run folder of a deployed federation."""
    return (folder / FEDERATION_DATABASE).exists()


def global_model(run: Path, batch: int = DEFAULT_BATCH) -> ModelOrigin:
    """Return the global model of the last finished round, with the score of the last evaluation."""
    with open_database(run) as database:
        if database is None:
            raise FedslrError(f"{run}: holds no federation; give the folder of --out of `fedslr federation start`")
        asked = options.from_text(database.fact("recipe"))
        method = asked.recipe.algorithm
        if not method.has_global_model:
            raise FedslrError(
                f"global: {method.name} has no global model; export a personal model on the client's node"
            )
        shared = Accounts(database, method).broadcast.shared()
        records, done = database.records(), int(database.fact("done"))
        clients, inputs = len(database.members()), database.fact("inputs")
    key = f"{asked.scorer().headline.name}_global"
    found = [record[key] for record in records if record.get(key) is not None]
    score = (found[-1] if found else None, 0)
    return _origin(asked, None, factored.multiply_out(shared), shared, batch, clients, done, score, inputs)


def personal_model(store: Path, client: int | None = None, batch: int = DEFAULT_BATCH) -> ModelOrigin:
    """Return a node's personal model as it was last evaluated."""
    page, found, params = NodeStore(store).last_evaluation()
    if client not in (None, page.client):
        raise FedslrError(f"--client: got {client}, but {store} is the store of client {page.client}")
    asked = options.from_text(page.recipe)
    parts = decode_parts(NodeStore(store).bytes(found.parts))
    score = (found.score, found.tested) if found.tested else (None, 0)
    clients = asked.recipe.data.clients
    return _origin(asked, page.client, params, parts, batch, clients, found.rounds, score, found.inputs)


def _origin(
    asked: options.Deployment,
    client: int | None,
    params: Params,
    kept: Payload,
    batch: int,
    clients: int,
    done: int,
    score: tuple[float | None, int],
    inputs: str | None,
) -> ModelOrigin:
    model, recipe = asked.problem().model, asked.recipe
    model.load_state_dict(params, strict=False)
    about: dict[str, Any] = {
        "input_shape": list(asked.options.shape),
        "classes": asked.options.classes,
        "task": asked.task,
        "metric": headline(asked.scorer().metrics[0])._asdict(),
        "class_names": None,
        "normalization": UNIT._asdict() if inputs == EIGHT_BIT else None,
        "method": recipe.algorithm.name,
        "dataset": NODE_DATASET,
        "clients": clients,
        "rounds": done,
        "seed": recipe.settings.seed,
        "rounds_left": max(0, recipe.settings.rounds - done),
    }
    return ModelOrigin(
        layered_model(client, model, params, kept, made_up_inputs(model, (batch, *asked.options.shape))),
        about,
        dataclasses.asdict(recipe.algorithm),  # type: ignore[call-overload]
        lambda answers: score,
    )
