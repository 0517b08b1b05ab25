"""`export`: one model of a run as a file, checked against the dense model, with a card beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedslr.core.durable import disk_errors, write_durably
from fedslr.core.errors import FedslrError
from fedslr.export import layer_forms, programs, safetensors_file
from fedslr.export.layered_model import DEFAULT_BATCH, Forms, LayeredModel, ModelOrigin, describe, origin_in_run
from fedslr.export.model_card import ExportFacts, card
from fedslr.export.runtimes import OnnxRuntime, Torch
from fedslr.run.result import Result

SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}
PURPOSES = ("size", "speed")
MAX_DIFFERENCE = 1e-5
"""The largest difference of an answer from the dense model's: absolute, or relative to answers above 1."""


class Exported(NamedTuple):
    """An exported file, its model card, and its figures."""

    path: Path
    card: Path
    facts: ExportFacts


def export(
    result: Result,
    path: str | Path,
    *,
    client: int | str | None = None,
    format: str = "safetensors",
    purpose: str = "size",
    batch: int = DEFAULT_BATCH,
) -> Exported:
    """Write a client's personal model, or without a client the global one, to a file with a model card beside it.

    The file is read again before it is kept, and its answers are compared with those of the dense model.

    Args:
        result: The result of `run` or `open_run`.
        path: The file, which must not exist yet.
        client: The number or the name of the client.
        format: "safetensors", "torch" (torch.export) or "onnx".
        purpose: "size" makes every layer as small as it can be; "speed" gives every layer the form that is fastest for
            a batch of this size on this machine.
        batch: The number of samples of that batch.

    Returns:
        The paths of the file and its card, and the figures of the file.

    Raises:
        FedslrError: The request is wrong, the format cannot express the model, or the answers differ.

    Example:
        made = fedslr.export(result, "client7.onnx", client=7, format="onnx")
        print(made.facts.bytes, made.facts.score)
    """
    number = None if client is None else result.number_of(client)
    return write(lambda: origin_in_run(result, number, batch), Path(path), format, purpose)


def write(origin: Callable[[], ModelOrigin], target: Path, format: str, purpose: str) -> Exported:
    """Write a model to a file with a card beside it; refuse a wrong request before the model is made."""
    page = target.with_name(target.name + ".md")
    _check_request(target, page, format, purpose)
    made = origin()
    source = made.source
    forms = _choose_forms(source, format, purpose)
    about = describe(made.about, source, forms)
    data, numbers, answers = _encode(source, forms, about, format)
    difference = _difference(source, answers)
    score, tested = made.score(answers)
    facts = ExportFacts(
        file=target.name,
        format=format,
        purpose=purpose,
        client=source.client,
        score=score,
        tested=tested,
        bytes=len(data),
        dense_bytes=source.dense_bytes,
        numbers=numbers,
        dense_numbers=source.dense_numbers,
        difference=difference,
        about=about,
        hyperparameters=made.hyperparameters,
    )
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_durably(target, data)
    write_durably(page, card(facts).encode())
    return Exported(target, page, facts)


def _check_request(target: Path, page: Path, format: str, purpose: str) -> None:
    for name, value, known in (("format", format, tuple(SUFFIXES)), ("for", purpose, PURPOSES)):
        if value not in known:
            raise FedslrError(f"{name}: got '{value}', expected one of {', '.join(known)}")
    if format == "onnx" and not programs.has_onnx():
        packages = ", ".join(programs.ONNX_PACKAGES)
        raise FedslrError(f"format: onnx needs the packages {packages}: pip install 'fedslr[export]'")
    # torch.export.load insists on its suffix; a suffix of another format would mislead.
    suffix = SUFFIXES[format]
    if target.suffix != suffix and (format == "torch" or target.suffix in SUFFIXES.values()):
        wanted = f"expected a name that ends in {suffix}, or another format"
        raise FedslrError(f"out: got '{target.name}' for format {format}; {wanted}")
    if there := next((path for path in (target, page) if path.exists()), None):
        raise FedslrError(f"out: {there} already exists; choose another --out")


def _choose_forms(source: LayeredModel, format: str, purpose: str) -> Forms:
    if purpose == "size":
        return (layer_forms.smallest if format == "safetensors" else layer_forms.smallest_program)(source)
    runtime = OnnxRuntime() if format == "onnx" else Torch()
    runtime.sparse = format == "safetensors"
    return layer_forms.fastest(source, runtime)


def _encode(
    source: LayeredModel, forms: Forms, about: dict[str, Any], format: str
) -> tuple[bytes, int, programs.Answers]:
    """Return a file's bytes, its number of parameters, and the function that it computes when it is read again."""
    if format == "safetensors":
        data, numbers = safetensors_file.encode(about, source.layers, source.others)
        return data, numbers, safetensors_file.built(data, None if about["model"]["name"] else source.model)
    made = layer_forms.in_forms(source.model, source.layers, forms)
    numbers = sum(x.numel() for x in made.state_dict().values())
    if format == "torch":
        data = programs.torch_bytes(made, source.x)
        return data, numbers, programs.torch_answers(data)
    classes, normalization = about["model"]["class_names"], about["normalization"]
    data = programs.onnx_bytes(made, source.x, classes=classes, normalization=normalization)
    return data, numbers, programs.onnx_answers(data)


@torch.no_grad()
def _difference(source: LayeredModel, answers: programs.Answers) -> float:
    """Return the largest difference of the file's answers from the dense model's; refuse one that is too large."""
    expected, found = source.model(source.x), answers(source.x)
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= MAX_DIFFERENCE:
        text = f"the exported model's answers differ from the dense model's by {difference:.2g}, so it was not written"
        raise FedslrError(f"{text}; try another format")
    return difference
