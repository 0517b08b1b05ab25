"""The model card: a page beside an exported file with its model, score, size and a way to run it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedslr.core.targets import TARGETS
from fedslr.data.digits import DIGITS_SCALING
from fedslr.data.node_data import NODE_DATASET
from fedslr.report.number_text import format_bytes
from fedslr.storage.statistics import Headline

RUN_CODE = {
    "safetensors": "import fedslr\n\nmodel = fedslr.load_exported({file}{module})\nscores = model(inputs)",
    "torch": "import torch\n\nmodel = torch.export.load({file}).module()\nscores = model(inputs)",
    "onnx": (
        "import onnxruntime\n\nsession = onnxruntime.InferenceSession({file})\n"
        "scores = session.run(None, {{session.get_inputs()[0].name: inputs}})[0]"
    ),
}
FORM_WORDS = {
    "factors": "as two thin layers",
    "sparse": "as thin layers and a sparse product",
    "recomposed": "computed from factors and non-zeros",
}
PAGE = """# {title}

{model} of a federation, trained with {method} on {dataset}.

| | |
|---|---|
{table}

## Running it

```python
{code}
```

`inputs` is a batch of shape (batch, {shape}) of {dtype}. {scaling} `scores` has {scores}; the class with the largest \
score is the answer.

## Layers

Weight matrices: {layers}.

The answers of this file differ from those of the dense model by at most {difference:.1g} on the inputs it was \
checked with.
"""


class ExportFacts(NamedTuple):
    """The figures of an exported file."""

    file: str
    format: str
    purpose: str
    client: int | None
    score: float | None
    """The headline metric, see `about["metric"]`."""
    tested: int
    """Samples of the client's test set; 0 if the score is the mean over clients."""
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


def card(facts: ExportFacts) -> str:
    """Return the model card of an exported file as Markdown."""
    about, model, name = facts.about, facts.about["model"], facts.about["client_name"]
    module = "" if model["name"] else ", module_of_the_same_architecture"
    opening = model_name(facts.client, None if name is None else escaped(name))
    return PAGE.format(
        title=escaped(facts.file),
        model=opening[0].upper() + opening[1:],
        method=escaped(about["method"]),
        dataset=escaped(about["dataset"]),
        table="\n".join(f"| {title} | {escaped(value)} |" for title, value in _rows(facts).items()),
        code=RUN_CODE[facts.format].format(file=json.dumps(facts.file), module=module),
        shape=", ".join(map(str, model["input_shape"])),
        dtype=escaped(about["dtype"]),
        scaling=_scaling(about["dataset"], about["normalization"]),
        scores=_scores(model),
        layers=_layers(about["forms"], about["layers"]),
        difference=facts.difference,
    )


def _rows(facts: ExportFacts) -> dict[str, str]:
    about, metric = facts.about, Headline(**facts.about["metric"])
    settings = ", ".join(f"{name} = {value}" for name, value in facts.hyperparameters.items())
    done, left = about["rounds"], about["rounds_left"]
    tested = f"its {facts.tested} test samples" if facts.tested else "mean over clients, each on its own test set"
    return {
        "method": about["method"] + (f" ({settings})" if settings else ""),
        "data": f"{about['dataset']}, {about['clients']} clients",
        "rounds": f"{done} of {done + left}; the run was not finished" if left else str(done),
        "seed": str(about["seed"]),
        "architecture": about["model"]["name"] or about["model"]["class"],
        metric.words: f"{metric.text(facts.score)} ({tested})" if facts.score is not None else "not measured",
        "size of the file": f"{format_bytes(facts.bytes)}, {_share(facts.bytes, facts.dense_bytes)}",
        "parameters in it": f"{facts.numbers:,}, {_share(facts.numbers, facts.dense_numbers)}",
        "made for": facts.purpose,
    }


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} % of the dense model's"


def _scaling(dataset: str, normalization: Mapping[str, Any] | None) -> str:
    """Return a sentence that says how inputs are computed from the data."""
    if normalization is None:
        eight_bit = ", 8-bit images as numbers from 0 to 1" if dataset == NODE_DATASET else ""
        return DIGITS_SCALING if dataset == "digits" else f"They are given as the data were{eight_bit}."
    mean, deviation = (", ".join(f"{v:g}" for v in normalization[k]) for k in ("mean", "deviation"))
    return f"Pixels p from 0 to 255 are given as (p/255 − mean)/deviation, with mean {mean} and deviation {deviation}."


def _scores(model: Mapping[str, Any]) -> str:
    """Return the number of outputs, with the names of the classes; the model never learned outputs beyond them."""
    classes, scores, names = model["classes"], model["scores"], model["class_names"]
    text = TARGETS[model["task"]].outputs
    if scores > classes:
        text = f"{scores} numbers, of which the first {classes} are those of the {classes} classes"
    return text + ("" if names is None else ": " + ", ".join(f"{i} {escaped(name)}" for i, name in enumerate(names)))


def _layers(forms: Mapping[str, str], layers: int) -> str:
    counted = Counter(forms.values())
    parts = [f"{counted[form]} {text}" for form, text in FORM_WORDS.items() if counted[form]]
    return ", ".join([*parts, f"{layers - len(forms)} as they are"] if layers > len(forms) else parts)
