"""A client's samples as its run's models see them: the run folder is opened again, and nothing in it is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedslr.algorithms.layer_split import split_head
from fedslr.core.errors import FedslrError
from fedslr.core.types import Params
from fedslr.engine.rounds import Simulation
from fedslr.report.tables import Run
from fedslr.run.reopen import reopen

FEWEST = 5
"""Samples that are worth a picture."""


class Representation(NamedTuple):
    """What goes into the last layer, and what comes out of it."""

    name: str
    client: int
    labels: np.ndarray
    features: dict[str, np.ndarray]
    """By extractor: global or personal."""
    predictions: dict[tuple[str, str], np.ndarray]
    """By extractor and classifier."""


def represent(run: Run, client: int | None) -> Representation:
    """One client's test samples under both extractors and both classifiers."""
    simulation, shared, own, chosen = _open(run, client)
    data = simulation.federation.clients[chosen]
    if len(data.y_test) < FEWEST:
        raise FedslrError(f"tsne: client {chosen} has {len(data.y_test)} test samples, expected {FEWEST} or more")
    x = simulation.federation.inputs(data.x_test).to(next(iter(shared.values())).dtype)
    models = {"global": shared, "personal": own}
    features, predictions = {}, {}
    for extractor, body in models.items():
        for classifier, head in models.items():
            mixed = {**split_head(body)[0], **split_head(head)[1]}
            features[extractor], predictions[extractor, classifier] = _look(simulation, mixed, x)
    return Representation(str(run.summary["algorithm"]), chosen, data.y_test.numpy(), features, predictions)


def _open(run: Run, client: int | None) -> tuple[Simulation, Params, Params, int]:
    """The simulation as its newest checkpoint has it, its global model, and one client's own."""
    if not (run.folder / "checkpoint").is_dir():
        raise FedslrError(f"tsne: {run.folder} keeps no models (checkpoint/ is missing)")
    try:
        simulation = reopen(run.folder, None, None, None, "cpu", None, lambda text: None)
    except FedslrError as error:
        raise FedslrError(f"tsne: {run.folder} cannot be made again from its recipe: {error}") from error
    chosen = _choose(simulation, client, {c for record in run.records for c in record["clients"]})
    shared = simulation.algorithm.global_model(simulation.server)
    if shared is None:
        raise FedslrError(f"tsne: {simulation.algorithm.name} has no global model")
    return simulation, shared, simulation.personal_params(chosen), chosen


def _choose(simulation: Simulation, client: int | None, trained: Collection[int]) -> int:
    """The client that was asked for, or of those that have trained the one with the most labels to tell apart."""
    clients = simulation.federation.clients
    if client is None:

        def worth(number: int) -> tuple[bool, int, int, int]:
            tested = clients[number].y_test
            return number in trained, len(tested.unique()), len(tested), -number

        return max(range(len(clients)), key=worth)
    if not 0 <= client < len(clients):
        raise FedslrError(f"--client: got {client}, expected a whole number from 0 to {len(clients) - 1}")
    return client


def _look(simulation: Simulation, params: Params, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What reaches the last layer, and the label it says."""
    _, head = split_head(params)
    module = simulation.task.model.get_submodule(next(iter(head)).rpartition(".")[0])
    seen: list[Tensor] = []
    with _listening(module, seen), torch.no_grad():
        said = simulation.task.outputs(params, x).argmax(1)
    return seen[-1].flatten(1).numpy(), said.numpy()


@contextmanager
def _listening(module: torch.nn.Module, seen: list[Tensor]) -> Iterator[None]:
    def hear(_: Any, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handle = module.register_forward_pre_hook(hear)
    try:
        yield
    finally:
        handle.remove()
