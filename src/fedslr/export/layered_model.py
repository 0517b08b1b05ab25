"""A trained model by its layers, where it comes from, and the description of both that a file carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.core.matrix import is_matrix
from fedslr.core.types import Params, Payload
from fedslr.export.layer_forms import Forms
from fedslr.export.layer_parts import Layer, composed
from fedslr.export.torch_program import Answers
from fedslr.models import MODELS
from fedslr.run.result import Result

DEFAULT_BATCH = 20
"""Samples in the batch that forms are measured and answers are compared with."""


class LayeredModel(NamedTuple):
    """One model of a run: dense, by its layers, and with inputs to try it with."""

    client: int | None
    model: nn.Module
    layers: dict[str, Layer]
    others: dict[str, Tensor]
    """The rest of its state dict: buffers, and parameters that do not train."""
    x: Tensor

    @property
    def dense_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.model.state_dict().values())

    @property
    def dense_numbers(self) -> int:
        return sum(x.numel() for x in self.model.state_dict().values())


class ModelOrigin(NamedTuple):
    """A model, the run it comes from, and how the accuracy of an exported file is measured."""

    source: LayeredModel
    about: dict[str, Any]
    """Method, dataset, clients, rounds and those left, seed, and the form of the inputs."""
    hyperparameters: dict[str, Any]
    accuracy: Callable[[Answers], tuple[float | None, int]]
    """Returns, from a file's answers, its accuracy and the number of samples; 0 for a mean over clients."""


def layered_model(client: int | None, model: nn.Module, params: Params, kept: Payload, x: Tensor) -> LayeredModel:
    """Return a model with these parameters by the parts that its method keeps of them."""
    model = model.cpu().eval().requires_grad_(False)
    others = {name: x for name, x in model.state_dict().items() if name not in params}
    return LayeredModel(client, model, composed(kept, params), others, x.cpu())


def model_of_run(result: Result, client: int | None, batch: int = DEFAULT_BATCH) -> LayeredModel:
    """Return the personal model of a client, or without a client the global model."""
    if client is None and not result.has_global_model:
        raise FedslrError(f"global: {result.algorithm.name} has no global model; expected --client NUMBER")
    if client is None:
        params, kept, model = result.global_params, result.global_parts(), result.global_model()
    else:
        params, kept = result.personal_params(client), result.personal_parts(client)
        model = result.personal_model(client)
    held = result.federation.clients[client or 0]
    x = held.x_test if len(held.x_test) else held.x
    # A client with fewer samples repeats them.
    x = _as_inputs(result, x[torch.arange(batch) % len(x)], next(model.parameters()).dtype)
    return layered_model(client, model, params, kept, x)


def _as_inputs(result: Result, x: Tensor, dtype: torch.dtype) -> Tensor:
    shown = result.federation.inputs(x)
    return shown.to(dtype) if shown.is_floating_point() else shown


def origin_in_run(result: Result, client: int | None, batch: int) -> ModelOrigin:
    hyperparameters = dataclasses.asdict(result.algorithm)  # type: ignore[call-overload]
    source = model_of_run(result, client, batch)
    return ModelOrigin(source, about_run(result), hyperparameters, lambda answers: _accuracy(result, client, answers))


@torch.no_grad()
def _accuracy(result: Result, client: int | None, answers: Answers) -> tuple[float | None, int]:
    """Return a file's accuracy on the client's test set; for the global model, the recorded mean over clients."""
    if client is None:
        return result.summary["accuracy"]["global"], 0
    held = result.federation.clients[client]
    tested = len(held.y_test)
    if not tested:
        return None, 0
    dtype = next(iter(result.personal_params(client).values())).dtype
    scores = answers(_as_inputs(result, held.x_test, dtype))
    return float((scores.argmax(1) == held.y_test).double().mean()), tested


def about_run(result: Result) -> dict[str, Any]:
    federation, summary = result.federation, result.summary
    return {
        "input_shape": list(federation.input_shape),
        "classes": federation.num_classes,
        "class_names": None if federation.class_names is None else [readable(name) for name in federation.class_names],
        "client_names": federation.client_names,
        "normalization": None if federation.normalization is None else federation.normalization._asdict(),
        "method": summary["algorithm"],
        **{key: summary[key] for key in ("dataset", "clients", "rounds", "seed")},
        "rounds_left": result.rounds_left,
    }


def readable(name: str) -> str:
    """Return a name as valid UTF-8; the name of a folder may hold other bytes."""
    return name.encode("utf-8", "replace").decode()


@torch.no_grad()
def describe(known: Mapping[str, Any], source: LayeredModel, forms: Forms) -> dict[str, Any]:
    """Return the description in a file: how to build the model again, and where it comes from."""
    names, client = known.get("client_names"), source.client
    return {
        "model": {
            "name": next((name for name, made in MODELS.items() if made is type(source.model)), None),
            "class": type(source.model).__name__,
            "input_shape": known["input_shape"],
            "classes": known["classes"],
            "scores": source.model(source.x).shape[1],
            "class_names": known["class_names"],
        },
        "dtype": str(next(source.model.parameters()).dtype).removeprefix("torch."),
        "normalization": known["normalization"],
        "forms": forms,
        "layers": sum(is_matrix(layer.whole) for layer in source.layers.values()),
        "client": client,
        "client_name": None if names is None or client is None else readable(names[client]),
        **{key: known[key] for key in ("method", "dataset", "clients", "rounds", "seed", "rounds_left")},
    }
