"""A trained model by its layers, its origin, and the description of both that a file carries.

Every layer is the sum of a low-rank part and a remainder, as the method that trained it keeps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedslr.channel import measuring
from fedslr.core import factored
from fedslr.core.errors import FedslrError
from fedslr.core.matrix import LowRank, is_matrix, to_matrix
from fedslr.core.types import Params, Payload
from fedslr.data.described import DescribedFederation
from fedslr.data.federation import Federation
from fedslr.export.programs import Answers
from fedslr.models import MODELS
from fedslr.report.curves import by_client
from fedslr.run.result import Result

DEFAULT_BATCH = 20
"""Samples in the batch that forms are measured and answers are compared with."""
Forms = dict[str, str]
"""The form of every layer that is not dense, by the name of its weight: factors, sparse or recomposed."""
MAX_SPARSE_DENSITY = 0.2
"""A remainder with a larger share of non-zeros is not tried as a sparse product."""
RECOMPOSITION_BYTES = 2048
"""Approximate size of the operations that compute a weight from its parts in a program."""


@dataclass(frozen=True)
class Layer:
    """One parameter: whole = low + rest, either of which may be None."""

    whole: Tensor
    low: LowRank | None = None
    rest: Tensor | None = None

    @cached_property
    def factors(self) -> LowRank | None:
        """The whole as factors if they have fewer entries than the matrix, r(m + n) < mn; else None.

        A remainder with few non-zero rows or columns is low-rank too.
        """
        if self.low is None:
            return None
        both = self.low if self.rest is None else _joined(self.low, slender(self.rest))
        return both if factored.factors_are_smaller(both) else None

    @property
    def is_sparse(self) -> bool:
        """Whether there is a sparse remainder."""
        return self.rest is not None and int(torch.count_nonzero(self.rest)) <= MAX_SPARSE_DENSITY * self.rest.numel()

    def bytes_by_form(self) -> dict[str, int]:
        """Return the bytes that a program stores in each form; `recomposed` stores a 32-bit position per non-zero."""
        width = self.whole.element_size()
        low = 0 if self.low is None else self.low.numbers * width
        rest = 0 if self.rest is None else int(torch.count_nonzero(self.rest)) * (width + 4)
        found = {"dense": self.whole.numel() * width}
        if self.factors is not None:
            found["factors"] = self.factors.numbers * width
        if low + rest:
            found["recomposed"] = low + rest + RECOMPOSITION_BYTES
        return found

    def stored(self, form: str) -> dict[str, Tensor | LowRank]:
        """Return the tensors that a file stores: the parts of the form; for a dense layer, the fewest bytes."""
        if self.low is None:
            return {"": self.whole}
        parts: dict[str, Tensor | LowRank] = {"": self.low}
        if self.rest is not None:
            parts["added"] = self.rest
        if form != "dense":
            return parts
        return min(parts, {"": self.whole}, key=lambda stored: measuring.measure(stored).bytes)


def slender(x: Tensor) -> LowRank:
    """Return a tensor as exact factors: the non-zero rows or columns of its matrix, and their positions."""
    matrix = to_matrix(x)
    rows, columns = (matrix.any(axis).nonzero().flatten() for axis in (1, 0))
    if len(columns) <= len(rows):
        return LowRank(matrix[:, columns], torch.eye(matrix.shape[1], dtype=x.dtype)[:, columns], tuple(x.shape))
    return LowRank(torch.eye(matrix.shape[0], dtype=x.dtype)[:, rows], matrix[rows].mT, tuple(x.shape))


def _joined(a: LowRank, b: LowRank) -> LowRank:
    """Return a + b."""
    return LowRank(torch.cat([a.u, b.u], 1), torch.cat([a.v, b.v], 1), a.shape)


def composed(kept: Payload, model: Params) -> dict[str, Layer]:
    """Return every layer of a model as the sum of the parts that a method keeps, if they add up to the layer.

    The parts of `w + p` do. A mixture, or a model that was adapted on the client's data, is stored in full.
    """
    trees = list(kept.values()) if all(isinstance(x, dict) for x in kept.values()) else [kept]
    trees = [factored.to_device(tree, "cpu") for tree in trees]
    return {name: _layer(x.detach().cpu(), [tree[name] for tree in trees if name in tree]) for name, x in model.items()}


def _layer(whole: Tensor, terms: list[Tensor | LowRank]) -> Layer:
    factors = [term for term in terms if isinstance(term, LowRank)]
    rest = sum((term for term in terms if isinstance(term, Tensor)), torch.zeros_like(whole))
    total = sum((term.dense() for term in factors), rest)
    low = functools.reduce(_joined, factors) if factors else None
    tolerance = 1e-7 * float(whole.abs().max()) if whole.numel() else 0.0
    adds_up = torch.allclose(total, whole, rtol=1e-5, atol=tolerance)
    if not adds_up or (low is not None and not factored.factors_are_smaller(low)):
        return Layer(whole, rest=whole)
    return Layer(whole, low, rest if bool(rest.any()) else None)


class LayeredModel(NamedTuple):
    """One model of a run: dense, by its layers, and with inputs to try it with."""

    client: int | None
    model: nn.Module
    layers: dict[str, Layer]
    others: dict[str, Tensor]
    """The rest of its state dict: buffers, and parameters that are not trained."""
    x: Tensor

    @property
    def dense_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.model.state_dict().values())

    @property
    def dense_numbers(self) -> int:
        return sum(x.numel() for x in self.model.state_dict().values())


class ModelOrigin(NamedTuple):
    """A model, the run it comes from, and the way to measure the headline metric of an exported file."""

    source: LayeredModel
    about: dict[str, Any]
    """Method, dataset, clients, rounds and remaining rounds, seed, and the form of the inputs."""
    hyperparameters: dict[str, Any]
    score: Callable[[Answers], tuple[float | None, int]]
    """Returns, from a file's answers, its headline metric and the number of samples; 0 for a mean over clients."""


def layered_model(client: int | None, model: nn.Module, params: Params, kept: Payload, x: Tensor) -> LayeredModel:
    """Return a model with these parameters by the parts that its method keeps of them."""
    model = model.cpu().eval().requires_grad_(False)
    others = {name: x for name, x in model.state_dict().items() if name not in params}
    return LayeredModel(client, model, composed(kept, params), others, x.cpu())


def model_of_run(result: Result, client: int | None, batch: int = DEFAULT_BATCH) -> LayeredModel:
    """Return the personal model of a client, or without a client the global model."""
    if client is None:
        if not result.has_global_model:
            raise FedslrError(f"global: {result.algorithm.name} has no global model; expected --client NUMBER")
        params, kept, model = result.global_params, result.global_parts(), result.global_model()
    else:
        params, kept = result.personal_params(client), result.personal_parts(client)
        model = result.personal_model(client)
    x = _samples(result.federation, client or 0, model, batch)
    return layered_model(client, model, params, kept, x)


def _samples(federation: Federation, client: int, model: nn.Module, batch: int) -> Tensor:
    """Return a client's samples to compare answers with."""
    if isinstance(federation, DescribedFederation):
        return made_up_inputs(model, (batch, *federation.input_shape))
    held = federation.clients[client]
    x = held.x_test if len(held.x_test) else held.x
    # A client with fewer samples repeats them.
    x = federation.inputs(x[torch.arange(batch) % len(x)])
    return x.to(next(model.parameters()).dtype) if x.is_floating_point() else x


@torch.no_grad()
def made_up_inputs(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return inputs to compare answers with: random numbers, or zeros as codes for a model that takes codes."""
    first = next(model.parameters())
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(first.device, first.dtype)
    codes = torch.zeros(shape, dtype=torch.int64, device=first.device)
    for x in (numbers, codes):
        with contextlib.suppress(Exception):  # a person's own model that takes neither is refused below
            model.eval()(x)
            return x
    raise FedslrError(f"model: it takes neither numbers nor codes of shape {list(shape)}, so that it cannot be tried")


def origin_in_run(result: Result, client: int | None, batch: int) -> ModelOrigin:
    """Return a model of a run and its origin."""
    source = model_of_run(result, client, batch)

    def score(answers: Answers) -> tuple[float | None, int]:
        if client is None:
            return result.summary[result.headline.name]["global"], 0
        if isinstance(result.federation, DescribedFederation):
            last = by_client(result.as_run(), result.headline.key("personal", per_client=True))
            return last.get(client), result.federation.sizes[client][1]
        held = result.federation.clients[client]
        if not len(held.y_test):
            return None, 0
        outputs = answers(result.federation.inputs(held.x_test).to(source.x.dtype))
        return result.scorer.score(outputs, held.y_test)[result.headline.name], len(held.y_test)

    hyperparameters = dataclasses.asdict(result.algorithm)  # type: ignore[call-overload]
    return ModelOrigin(source, about_run(result), hyperparameters, score)


def about_run(result: Result) -> dict[str, Any]:
    """Return the facts of a run that the description of a model needs."""
    federation, summary = result.federation, result.summary
    return {
        "input_shape": list(federation.input_shape),
        "classes": federation.num_classes,
        "task": federation.task,
        "metric": result.headline._asdict(),
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


def describe(about: Mapping[str, Any], source: LayeredModel, forms: Forms) -> dict[str, Any]:
    """Return the description in a file: how to build the model again, and its origin."""
    about, client = dict(about), source.client
    names = about.pop("client_names", None)
    return {
        "model": {
            "name": next((name for name, made in MODELS.items() if made is type(source.model)), None),
            "class": type(source.model).__name__,
            "scores": source.model(source.x).shape[-1],
            **{key: about.pop(key) for key in ("input_shape", "classes", "class_names", "task")},
        },
        "dtype": str(next(source.model.parameters()).dtype).removeprefix("torch."),
        "forms": forms,
        "layers": sum(is_matrix(layer.whole) for layer in source.layers.values()),
        "client": client,
        "client_name": None if names is None or client is None else readable(names[client]),
        **about,
    }
