"""Models of a deployed federation, for `export`: the global one from the server's ledger, a client's from its node."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedslr.channel import encoding
from fedslr.core.errors import FedslrError
from fedslr.core.states import restore
from fedslr.core.types import Params, Payload
from fedslr.data.normalization import UNIT
from fedslr.data.own import DEPLOYED
from fedslr.deploy import options
from fedslr.deploy.ledger import FILE, books
from fedslr.deploy.messages import EIGHT_BIT
from fedslr.deploy.node_store import PAGE, NodeStore
from fedslr.export.export import BATCH, Origin, sourced


def is_store(folder: Path) -> bool:
    return (folder / PAGE).exists()


def is_deployed(folder: Path) -> bool:
    return (folder / FILE).exists()


def global_model(run: Path, batch: int = BATCH) -> Origin:
    """The global model of the last finished round; its accuracy is that of the last evaluation."""
    with books(run) as ledger:
        if ledger is None:
            raise FedslrError(f"{run}: holds no federation ({FILE} is empty)")
        asked = options.from_text(ledger.fact("recipe"))
        method, start = asked.recipe.algorithm, ledger.tree("start")
        server = restore(type(method.init_server(start, 1)), ledger.tree("server"))
        params, records, done = method.global_model(server), ledger.records(), int(ledger.fact("done"))
        clients, inputs = len(ledger.members()), ledger.fact("inputs")
    if params is None:
        raise FedslrError(f"global: {method.name} has no global model; export a client's on its node")
    found = [record["accuracy_global"] for record in records if record.get("accuracy_global") is not None]
    kept = method.shared(method.broadcast(server))
    return _origin(asked, None, params, kept, batch, clients, done, (found[-1] if found else None, 0), inputs)


def personal_model(store: Path, client: int | None = None, batch: int = BATCH) -> Origin:
    """A node's personal model, as it was last evaluated."""
    kept = NodeStore(store)
    page = kept.read()
    if page is None or page.personal is None:
        raise FedslrError(f"{store}: has no personal model yet; it has one after the first evaluation")
    if client not in (None, page.client):
        raise FedslrError(f"--client: got {client}, but {store} is the store of client {page.client}")
    asked = options.from_text(page.recipe)
    params: Params = kept.personal(page.personal)
    parts = {} if page.parts is None else encoding.decode(kept.bytes(page.parts))
    done, accuracy, tested = page.evaluation or (0, -1.0, 0)
    good = (accuracy, tested) if tested and accuracy >= 0 else (None, 0)
    return _origin(asked, page.client, params, parts, batch, asked.recipe.data.clients, done, good, page.inputs)


def _origin(
    asked: options.Deployment,
    client: int | None,
    params: Params,
    kept: Payload,
    batch: int,
    clients: int,
    done: int,
    accuracy: tuple[float | None, int],
    inputs: str | None,
) -> Origin:
    model, recipe = asked.task().model, asked.recipe
    model.load_state_dict(params, strict=False)
    about: dict[str, Any] = {
        "input_shape": list(asked.options.shape),
        "classes": asked.options.classes,
        "class_names": None,
        "normalization": UNIT._asdict() if inputs == EIGHT_BIT else None,
        "method": recipe.algorithm.name,
        "dataset": DEPLOYED,
        "clients": clients,
        "rounds": done,
        "seed": recipe.settings.seed,
        "rounds_left": max(0, recipe.settings.rounds - done),
    }
    return Origin(
        sourced(client, model, params, kept, _inputs(model, (batch, *asked.options.shape))),
        about,
        dataclasses.asdict(recipe.algorithm),  # type: ignore[call-overload]
        lambda answers: accuracy,
    )


@torch.no_grad()
def _inputs(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Inputs to compare answers with, where there are no data: some numbers, or codes for a model that takes those."""
    first = next(model.parameters())
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(first.device, first.dtype)
    codes = torch.zeros(shape, dtype=torch.int64, device=first.device)
    for x in (numbers, codes):
        with contextlib.suppress(Exception):  # a model of one's own that takes neither says so below
            model.eval()(x)
            return x
    raise FedslrError(f"model: it takes neither numbers nor codes of shape {list(shape)}, so that it cannot be tried")
