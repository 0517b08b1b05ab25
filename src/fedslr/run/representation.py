"""One client's samples as the models of its run represent them, for the t-SNE figure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedslr.algorithms.layer_split import split_head
from fedslr.core.errors import FedslrError
from fedslr.report.saved_runs import Run
from fedslr.run.reopen import open_run
from fedslr.run.result import Result, find_client

MIN_SAMPLES = 5
"""With fewer samples than this the figure shows nothing."""


class Representation(NamedTuple):
    """The inputs of the last layer, and the labels that it predicts."""

    name: str
    client: int
    labels: np.ndarray
    features: dict[str, np.ndarray]
    """By extractor: global or personal."""
    predictions: dict[tuple[str, str], np.ndarray]
    """By extractor and classifier."""


def represent(run: Run, client: int | str | None) -> Representation:
    """Return one client's test samples under both extractors and both classifiers."""
    try:
        result = open_run(run.folder, device="cpu", warn=lambda text: None)
    except FedslrError as error:
        raise FedslrError(f"tsne: {error}") from error
    if not result.has_global_model:
        raise FedslrError(f"tsne: {result.algorithm.name} has no global model to compare; leave {run.folder} out")
    chosen = _choose(result, client, {c for record in run.records for c in record["clients"]})
    data = result.federation.clients[chosen]
    if len(data.y_test) < MIN_SAMPLES:
        found = f"client {chosen} of {run.folder} has {len(data.y_test)} test samples"
        raise FedslrError(f"tsne: {found}; choose one with {MIN_SAMPLES} or more (--client)")
    models = {"global": result.global_params, "personal": result.personal_params(chosen)}
    network = result.global_model()
    x = result.federation.inputs(data.x_test).to(next(iter(models["global"].values())).dtype)
    features, predictions = {}, {}
    for extractor, body in models.items():
        for classifier, head in models.items():
            classifying = split_head(head)[1]
            network.load_state_dict({**split_head(body)[0], **classifying}, strict=False)
            last = network.get_submodule(next(iter(classifying)).rpartition(".")[0])
            features[extractor], predictions[extractor, classifier] = _outputs(network, last, x)
    return Representation(str(run.summary["algorithm"]), chosen, data.y_test.numpy(), features, predictions)


def _choose(result: Result, client: int | str | None, trained: Collection[int]) -> int:
    """Return the given client; without one, the client with the most labels among those that have trained."""
    clients = result.federation.clients
    if client is None:

        def rank(number: int) -> tuple[bool, int, int, int]:
            tested = clients[number].y_test
            return number in trained, len(tested.unique()), len(tested), -number

        return max(range(len(clients)), key=rank)
    return find_client(str(client), result.federation)


@torch.no_grad()
def _outputs(network: nn.Module, last: nn.Module, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of the last layer and the predicted labels."""
    seen: list[Tensor] = []

    def keep_input(_: Any, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    handle = last.register_forward_pre_hook(keep_input)
    predicted = network(x).argmax(1)
    handle.remove()
    return seen[-1].flatten(1).numpy(), predicted.numpy()
