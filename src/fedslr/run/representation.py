"""A client's samples as the models of its run represent them, read from the run folder."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedslr.algorithms.layer_split import split_head
from fedslr.core.errors import FedslrError
from fedslr.core.types import Params
from fedslr.engine.rounds import Simulation
from fedslr.report.saved_runs import Run
from fedslr.run.reopen import reopen

MIN_SAMPLES = 5
"""Samples below which a picture shows nothing."""


class Representation(NamedTuple):
    """The inputs of the last layer, and the labels it predicts."""

    name: str
    client: int
    labels: np.ndarray
    features: dict[str, np.ndarray]
    """By extractor: global or personal."""
    predictions: dict[tuple[str, str], np.ndarray]
    """By extractor and classifier."""


def represent(run: Run, client: int | None) -> Representation:
    """Return one client's test samples under both extractors and both classifiers."""
    try:
        simulation = reopen(run.folder)
    except FedslrError as error:
        raise FedslrError(f"tsne: {error}") from error
    chosen = _choose(simulation, client, {c for record in run.records for c in record["clients"]})
    shared = simulation.state.global_model()
    if shared is None:
        raise FedslrError(f"tsne: {simulation.algorithm.name} has no global model")
    data = simulation.federation.clients[chosen]
    if len(data.y_test) < MIN_SAMPLES:
        raise FedslrError(f"tsne: client {chosen} has {len(data.y_test)} test samples, expected {MIN_SAMPLES} or more")
    x = simulation.federation.inputs(data.x_test).to(next(iter(shared.values())).dtype)
    models = {"global": shared, "personal": simulation.personal_params(chosen)}
    features, predictions = {}, {}
    for extractor, body in models.items():
        for classifier, head in models.items():
            mixed = {**split_head(body)[0], **split_head(head)[1]}
            features[extractor], predictions[extractor, classifier] = _outputs(simulation, mixed, x)
    return Representation(str(run.summary["algorithm"]), chosen, data.y_test.numpy(), features, predictions)


def _choose(simulation: Simulation, client: int | None, trained: Collection[int]) -> int:
    """Return the given client; without one, the client with the most labels among those that have trained."""
    clients = simulation.federation.clients
    if client is None:

        def rank(number: int) -> tuple[bool, int, int, int]:
            tested = clients[number].y_test
            return number in trained, len(tested.unique()), len(tested), -number

        return max(range(len(clients)), key=rank)
    if client not in range(len(clients)):
        raise FedslrError(f"--client: got {client}, expected a whole number from 0 to {len(clients) - 1}")
    return client


def _outputs(simulation: Simulation, params: Params, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of the last layer and the predicted labels."""
    last = simulation.problem.model.get_submodule(next(iter(split_head(params)[1])).rpartition(".")[0])
    seen: list[Tensor] = []

    def keep_input(_: Any, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handle = last.register_forward_pre_hook(keep_input)
    with torch.no_grad():
        predicted = simulation.problem.outputs(params, x).argmax(1)
    handle.remove()
    return seen[-1].flatten(1).numpy(), predicted.numpy()
