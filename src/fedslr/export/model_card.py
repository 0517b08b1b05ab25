"""The model card: a page beside an exported file with its model, accuracy, size and a way to run it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedslr.data.digits import DIGITS_SCALING
from fedslr.data.node_data import NODE_DATASET
from fedslr.report.number_text import format_bytes, percent

RUN_CODE = {
    "safetensors": "import fedslr\n\nmodel = fedslr.load_exported({file}{module})\nscores = model(inputs)",
    "torch": "import torch\n\nmodel = torch.export.load({file}).module()\nscores = model(inputs)",
    "onnx": (
        "import onnxruntime\n\nsession = onnxruntime.InferenceSession({file})\n"
        "scores = session.run(None, {{session.get_inputs()[0].name: inputs}})[0]"
    ),
}


class ExportFacts(NamedTuple):
    """The figures of an exported file."""

    file: str
    format: str
    purpose: str
    client: int | None
    accuracy: float | None
    tested: int
    """Samples of the client's test set; 0 where the accuracy is the mean over clients."""
    bytes: int
    dense_bytes: int
    numbers: int
    dense_numbers: int
    difference: float
    about: Mapping[str, Any]
    """The description that a safetensors file carries."""
    hyperparameters: Mapping[str, Any]


def escaped(text: object) -> str:
    """Return a user's text as one line of Markdown without markup."""
    return re.sub(r"([\\\\`*_{}\[\]()<>#+!|~&$-])", r"\\\1", " ".join(str(text).split()))


def model_name(client: int | None, name: str | None = None) -> str:
    """Return the client of a model by its number, and by its name if that differs."""
    if client is None:
        return "the global model"
    return f"the personal model of client {client}" + (f" ({name})" if name not in (None, str(client)) else "")


def _opening(client: int | None, name: str | None) -> str:
    text = model_name(client, None if name is None else escaped(name))
    return text[0].upper() + text[1:]


def rounds(about: Mapping[str, Any]) -> str:
    done, left = about["rounds"], about["rounds_left"]
    return f"{done} of {done + left}; the run was not finished" if left else str(done)


def card(facts: ExportFacts) -> str:
    about = facts.about
    run = RUN_CODE[facts.format].format(
        file=json.dumps(facts.file), module="" if about["model"]["name"] else ", module_of_the_same_architecture"
    )
    return (
        "\n\n".join(
            [
                f"# {escaped(facts.file)}",
                f"{_opening(facts.client, about['client_name'])} of a federation, "
                f"trained with {escaped(about['method'])} on {escaped(about['dataset'])}.",
                _table(_rows(facts)),
                "## Running it",
                f"```python\n{run}\n```",
                f"`inputs` is a batch of shape {_shape(about['model']['input_shape'])} of {escaped(about['dtype'])}. "
                f"{_scaled(about['dataset'], about['normalization'])} "
                f"`scores` has {_scores(about['model'])}{_class_names(about['model']['class_names'])}; "
                "the largest is the answer.",
                "## Layers",
                _layers(about["forms"], about["layers"]),
                "The answers of this file differ from those of the dense model by at most "
                f"{facts.difference:.1g} on the inputs it was checked with.",
            ]
        )
        + "\n"
    )


def _rows(facts: ExportFacts) -> list[tuple[str, str]]:
    about = facts.about
    settings = ", ".join(f"{name} = {value}" for name, value in facts.hyperparameters.items())
    tested = f"its {facts.tested} test samples" if facts.tested else "mean over clients, each on its own test set"
    return [
        ("method", about["method"] + (f" ({settings})" if settings else "")),
        ("data", f"{about['dataset']}, {about['clients']} clients"),
        ("rounds", rounds(about)),
        ("seed", f"{about['seed']}"),
        ("architecture", about["model"]["name"] or about["model"]["class"]),
        ("accuracy", f"{percent(facts.accuracy)} ({tested})" if facts.accuracy is not None else "not measured"),
        ("size of the file", f"{format_bytes(facts.bytes)}, {_share(facts.bytes, facts.dense_bytes)}"),
        ("numbers in it", f"{facts.numbers:,}, {_share(facts.numbers, facts.dense_numbers)}"),
        ("made for", facts.purpose),
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} % of the dense model's" if whole else "–"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {escaped(value)} |" for name, value in rows)])


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(["batch", *map(str, shape)]) + ")"


def _scaled(dataset: str, normalization: Mapping[str, Any] | None) -> str:
    """Return how inputs were made from the data."""
    if normalization is None:
        eight_bit = ", 8-bit images as numbers from 0 to 1" if dataset == NODE_DATASET else ""
        return DIGITS_SCALING if dataset == "digits" else f"They are given as the data were{eight_bit}."
    mean, deviation = (", ".join(f"{v:g}" for v in normalization[k]) for k in ("mean", "deviation"))
    return f"Pixels p from 0 to 255 are given as (p/255 − mean)/deviation, with mean {mean} and deviation {deviation}."


def _scores(model: Mapping[str, Any]) -> str:
    """Return the number of outputs; the model never learned those beyond the classes."""
    classes, scores = model["classes"], model["scores"]
    if scores == classes:
        return "one number per class"
    return f"{scores} numbers, of which the first {classes} are those of the {classes} classes"


def _class_names(names: Sequence[str] | None) -> str:
    return "" if names is None else ": " + ", ".join(f"{i} {escaped(name)}" for i, name in enumerate(names))


def _layers(forms: Mapping[str, str], layers: int) -> str:
    counted = Counter(forms.values())
    words = {
        "factors": "as two thin layers",
        "sparse": "as thin layers and a sparse product",
        "recomposed": "put together from factors and non-zeros",
    }
    parts = [f"{counted[form]} {text}" for form, text in words.items() if counted[form]]
    if dense := layers - len(forms):
        parts.append(f"{dense} as they are")
    return f"Weight matrices: {', '.join(parts)}."
