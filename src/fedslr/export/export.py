"""`export`: one model of a run as a file of its own, checked against the dense model, with a card beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError
from fedslr.core.matrix import is_matrix
from fedslr.core.types import Params, Payload
from fedslr.export import files, forms, programs
from fedslr.export.card import Facts, card
from fedslr.export.forms import Forms
from fedslr.export.parts import Layer, composed
from fedslr.export.timing import OnnxRuntime, Runtime, Torch
from fedslr.models import MODELS
from fedslr.run.result import Result

SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}
PURPOSES = ("size", "speed")
TOLERANCE = 1e-5
"""How far an answer may be from the dense model's: absolutely, or relative to answers above 1."""
BATCH = 20


class Exported(NamedTuple):
    """A file that ships, and its figures."""

    path: Path
    card: Path
    facts: Facts


class Source(NamedTuple):
    """One model of a run: dense, by its layers, and with inputs it was made for."""

    client: int | None
    model: nn.Module
    layers: dict[str, Layer]
    others: dict[str, Tensor]
    """What else its state dict has: buffers, and parameters that do not train."""
    x: Tensor

    @property
    def dense_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.model.state_dict().values())

    @property
    def dense_numbers(self) -> int:
        return sum(x.numel() for x in self.model.state_dict().values())


Answers = Callable[[Tensor], Tensor]


class Origin(NamedTuple):
    """Where a model comes from, and how good what is made of it turns out to be."""

    source: Source
    about: dict[str, Any]
    """What a file says of that: method, dataset, clients, rounds and those left, seed, and what inputs are like."""
    hyperparameters: dict[str, Any]
    accuracy: Callable[[Answers], tuple[float | None, int]]
    """By a file's answers: its accuracy, and on how many samples of one client; 0 where it is a mean over clients."""


def source(result: Result, client: int | None, batch: int = BATCH) -> Source:
    """The personal model of a client, or the global model."""
    if client is None and not result.has_global_model:
        raise FedslrError(f"global: {result.algorithm.name} has no global model; expected --client NUMBER")
    if client is None:
        params, kept, model = result.global_params, result.global_parts(), result.global_model()
    else:
        params, kept = result.personal_params(client), result.personal_parts(client)
        model = result.personal_model(client)
    return sourced(client, model, params, kept, _inputs(result, client or 0, batch, model))


def sourced(client: int | None, model: nn.Module, params: Params, kept: Payload, x: Tensor) -> Source:
    """A model that has these parameters, with what a method keeps of them, and inputs to try it with."""
    model = model.cpu().eval().requires_grad_(False)
    others = {name: x for name, x in model.state_dict().items() if name not in params}
    return Source(client, model, composed(kept, params), others, x.cpu())


def _inputs(result: Result, client: int, batch: int, model: nn.Module) -> Tensor:
    """A batch of a client's own inputs; again from the first where it has too few."""
    held = result.federation.clients[client]
    x = held.x_test if len(held.x_test) else held.x
    shown = result.federation.inputs(x[torch.arange(batch) % len(x)])
    return shown.to(next(model.parameters()).dtype) if shown.is_floating_point() else shown


def export(
    result: Result,
    path: str | Path,
    *,
    client: int | None = None,
    format: str = "safetensors",
    purpose: str = "size",
    batch: int = BATCH,
) -> Exported:
    """Write a client's personal model, or without a client the global one, to a file, and a card beside it.

    A result is what `run` or `open_run` gave. `purpose="size"` makes every layer as small as it can be; `"speed"` gives
    every layer the form that is fastest for a batch of this size on this machine.
    """
    if not isinstance(result, Result):
        raise FedslrError(f"export: got a {type(result).__name__}, expected what fedslr.run or fedslr.open_run gave")
    return write(lambda: _of(result, client, batch), Path(path), format, purpose)


def write(origin: Callable[[], Origin], target: Path, format: str, purpose: str) -> Exported:
    """Write a model to a file, and a card beside it, once it is known that the file can be as it is asked for."""
    for name, value, known in (("format", format, tuple(SUFFIXES)), ("for", purpose, PURPOSES)):
        if value not in known:
            raise FedslrError(f"{name}: got '{value}', expected {', '.join(known)}")
    if format == "onnx":
        programs.require_onnx()
    if format == "torch" and target.suffix != SUFFIXES[format]:
        raise FedslrError(f"out: got '{target.name}', expected a name that ends in .pt2, as torch.export.load does")
    if target.suffix in SUFFIXES.values() and target.suffix != SUFFIXES[format]:
        other = next(name for name, suffix in SUFFIXES.items() if suffix == target.suffix)
        wanted = f"{SUFFIXES[format]}, or format {other}"
        raise FedslrError(f"out: got '{target.name}' for format {format}; expected {wanted}")
    page = target.with_name(target.name + ".md")
    for there in (target, page):
        if there.exists():
            raise FedslrError(f"out: {there} already exists; choose another --out")
    made = origin()
    chosen = made.source
    plan = _plan(chosen, format, purpose)
    about = describe(made.about, chosen, plan)
    data, numbers, answers = _written(chosen, plan, about, format)
    difference = _checked(chosen, answers)
    accuracy, tested = made.accuracy(answers)
    facts = Facts(
        target.name,
        format,
        purpose,
        chosen.client,
        accuracy,
        tested,
        len(data),
        chosen.dense_bytes,
        numbers,
        chosen.dense_numbers,
        difference,
        about,
        made.hyperparameters,
    )
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_durably(target, data)
    write_durably(page, card(facts).encode())
    return Exported(target, page, facts)


def _of(result: Result, client: int | None, batch: int) -> Origin:
    return Origin(
        source(result, client, batch),
        about(result),
        dataclasses.asdict(result.algorithm),  # type: ignore[call-overload]
        lambda answers: _accuracy(result, client, answers),
    )


def _plan(chosen: Source, format: str, purpose: str) -> Forms:
    if purpose == "size":
        small = forms.smallest if format == "safetensors" else forms.smallest_program
        return small(chosen.model, chosen.layers)
    runtime: Runtime = OnnxRuntime() if format == "onnx" else Torch()
    if format == "torch":
        runtime.sparse = False
    return forms.fastest(chosen.model, chosen.layers, chosen.x, runtime)


def about(result: Result) -> dict[str, Any]:
    """Where the models of a run come from."""
    federation, summary = result.federation, result.summary
    normalization = federation.normalization
    return {
        "input_shape": list(federation.input_shape),
        "classes": federation.num_classes,
        "class_names": None if federation.class_names is None else [readable(name) for name in federation.class_names],
        "client_names": federation.client_names,
        "normalization": None if normalization is None else normalization._asdict(),
        "method": summary["algorithm"],
        **{key: summary[key] for key in ("dataset", "clients", "rounds", "seed")},
        "rounds_left": result.rounds_left,
    }


def readable(name: str) -> str:
    """A name as text: a folder's may have bytes that are none."""
    return name.encode("utf-8", "replace").decode()


@torch.no_grad()
def describe(known: Mapping[str, Any], chosen: Source, plan: Forms) -> dict[str, Any]:
    """What a file says of itself: all that is needed to build the model again, and where it comes from."""
    by_class = {made: name for name, made in MODELS.items()}
    return {
        "model": {
            "name": by_class.get(type(chosen.model)),
            "class": type(chosen.model).__name__,
            "input_shape": known["input_shape"],
            "classes": known["classes"],
            "scores": chosen.model(chosen.x).shape[1],
            "class_names": known["class_names"],
        },
        "dtype": str(next(chosen.model.parameters()).dtype).removeprefix("torch."),
        "normalization": known["normalization"],
        "forms": plan,
        "layers": sum(is_matrix(layer.whole) for layer in chosen.layers.values()),
        "client": chosen.client,
        "client_name": _name(known.get("client_names"), chosen.client),
        **{key: known[key] for key in ("method", "dataset", "clients", "rounds", "seed", "rounds_left")},
    }


def _name(names: Sequence[str] | None, client: int | None) -> str | None:
    return None if names is None or client is None else readable(names[client])


def _written(chosen: Source, plan: Forms, about: dict[str, Any], format: str) -> tuple[bytes, int, Answers]:
    """A file's bytes, the numbers in it, and what it answers when it is read again."""
    if format == "safetensors":
        data, numbers = files.encode(about, chosen.layers, chosen.others)
        return data, numbers, files.built(data, None if about["model"]["name"] else chosen.model)
    made = forms.shaped(chosen.model, chosen.layers, plan)
    numbers = sum(x.numel() for x in made.state_dict().values())
    if format == "torch":
        data = programs.torch_bytes(made, chosen.x)
        return data, numbers, programs.torch_answers(data)
    notes = {"classes": about["model"]["class_names"], "normalization": about["normalization"]}
    data = programs.with_notes(programs.onnx_bytes(made, chosen.x), notes)
    return data, numbers, programs.onnx_answers(data)


@torch.no_grad()
def _checked(chosen: Source, answers: Answers) -> float:
    """How far the file's answers are from the dense model's; too far is refused."""
    expected, found = chosen.model(chosen.x), answers(chosen.x)
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= TOLERANCE:
        raise FedslrError(
            f"the exported model's answers differ from the dense model's by {difference:.2g}; not written"
        )
    return difference


@torch.no_grad()
def _accuracy(result: Result, client: int | None, answers: Answers) -> tuple[float | None, int]:
    """On the client's test set, as the file answers; of the global model, the mean over clients as it was recorded."""
    if client is None:
        return result.summary["accuracy"]["global"], 0
    held = result.federation.clients[client]
    tested = len(held.y_test)
    if not tested:
        return None, 0
    dtype = next(iter(result.personal_params(client).values())).dtype
    shown = result.federation.inputs(held.x_test)
    scores = answers(shown.to(dtype) if shown.is_floating_point() else shown)
    return float((scores.argmax(1) == held.y_test).double().mean()), tested
