"""A model in a safetensors file: every layer in its fewest bytes, and a description from which it is built again.

Tensors have the names of the model's state dict: `conv.weight` if it is stored in full, `conv.weight.u` and `.v` if it
is stored as factors, `.values` with `.bitmap` or `.indices` if most of it is zero. `added/conv.weight…` is added to the
factors. The encodings are those of messages, and `fedslr/header` lists them as messages do. The file's metadata holds
the description as JSON under `fedslr`, and under `sha256` the digest of the description and of all tensors' bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor, nn

from fedslr.channel import layout, packing
from fedslr.core.errors import FedslrError
from fedslr.core.matrix import LowRank
from fedslr.core.targets import outputs_for
from fedslr.export.layer_forms import in_forms
from fedslr.export.layered_model import Layer
from fedslr.models import MODELS

FORMAT = 1
HEADER = "fedslr/header"
MAX_REASON_LETTERS = 300


def encode(about: Mapping[str, Any], layers: Mapping[str, Layer], others: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Return the file of a model, from its layers and the rest of its state dict; and its number of parameters."""
    stored = {name: layer.stored(about["forms"].get(name, "dense")) for name, layer in layers.items()}
    tree = {
        "model": {name: kept[""] for name, kept in stored.items()},
        "added": {name: kept["added"] for name, kept in stored.items() if "added" in kept},
        "others": dict(others),
    }
    packed = packing.pack(tree)
    names = _names(packed.arrays["header"])
    arrays = {names[key]: np.asarray(array, order="C") for key, array in packed.arrays.items()}
    text = json.dumps({"format": FORMAT, **about}, separators=(",", ":"))
    digest = _digest(text, safetensors.numpy.save(arrays))
    return safetensors.numpy.save(arrays, {"fedslr": text, "sha256": digest}), packed.numbers


def _digest(description: str, data: bytes) -> str:
    """Return the SHA-256 of a description and of the tensors of a safetensors file, which follow its index."""
    return hashlib.sha256(description.encode() + data[_index_end(data) :]).hexdigest()


def _index_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _names(header: layout.Array) -> dict[str, str]:
    """Return the names in a file of the arrays of a message."""
    names = {"header": HEADER}
    for i, (path, *_) in enumerate(json.loads(header.tobytes())):
        name = "/".join(path if path[0] == "added" else path[1:])
        names |= {f"{i}{ending}": f"{name}{ending}" for endings in layout.ARRAY_SUFFIXES.values() for ending in endings}
    return names


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, Layer], dict[str, Tensor]]:
    """Return the description, the layers and the rest of the state dict; raise an exception for a damaged file."""
    arrays = safetensors.numpy.load(data)
    metadata = json.loads(data[8 : _index_end(data)])["__metadata__"]
    about = json.loads(metadata["fedslr"])
    if about["format"] != FORMAT:
        raise FedslrError(f"it has format {about['format']!r}, but this version of fedslr reads format {FORMAT}")
    if metadata["sha256"] != _digest(metadata["fedslr"], data):
        raise FedslrError("it is damaged: its SHA-256 does not match; export the model again")
    names = _names(arrays[HEADER])
    tree = packing.unpack({key: arrays[name] for key, name in names.items() if name in arrays})
    parts, added = tree.get("model", {}), tree.get("added", {})
    return about, {name: _layer(part, added.get(name)) for name, part in parts.items()}, tree.get("others", {})


def _layer(part: Tensor | LowRank, added: Tensor | None) -> Layer:
    whole = part if isinstance(part, Tensor) else part.dense()
    whole = whole if added is None else whole + added
    return Layer(whole, part, added) if isinstance(part, LowRank) else Layer(whole, rest=whole)


def load_exported(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Load a safetensors file that `fedslr export` wrote; no run folder is needed, and nothing is unpickled.

    Args:
        path: The file.
        model: A module of the same architecture, if the model is your own: the file holds its weights, not its code.
            The weights of the module do not matter. A built-in model is built from the file's description.

    Returns:
        The model, ready to run.

    Raises:
        FedslrError: The file is missing or damaged, or the module does not fit it.

    Example:
        model = fedslr.load_exported("runs/one/export/client-7.safetensors")
        scores = model(inputs)
    """
    try:
        return built(Path(path).read_bytes(), model)
    except Exception as error:
        why = getattr(error, "strerror", None) or " ".join(line.strip(" \t.") for line in str(error).splitlines())
        why = ("it has no " if isinstance(error, KeyError) else "") + why[:MAX_REASON_LETTERS]
        wanted = "give a file that `fedslr export` wrote and, for a model of your own, a module of its architecture"
        raise FedslrError(f"{path}: cannot load this file: {why}; {wanted}") from error


def built(data: bytes, model: nn.Module | None = None) -> nn.Module:
    """Return the model in a file's bytes, its layers in the forms that the description names."""
    about, layers, others = decode(data)
    made = copy.deepcopy(_template(about["model"]) if model is None else model)
    weights = {**{name: layer.whole for name, layer in layers.items()}, **others}
    made.load_state_dict(weights, strict=True, assign=True)
    return in_forms(made, layers, about["forms"])


def _template(kind: Mapping[str, Any]) -> nn.Module:
    """Return the built-in architecture of this name, without weights. A file cannot name other code."""
    if kind["name"] not in MODELS:
        raise FedslrError("it holds the weights of a model of your own, and no module was given")
    # A wrong size takes no memory on this device; the weights will not fit it.
    with torch.device("meta"):
        return MODELS[kind["name"]](
            tuple(kind["input_shape"]), outputs_for(kind.get("task", "classification"), kind["classes"])
        )
