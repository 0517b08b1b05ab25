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

from fedslr.channel import encoding, layout, packing
from fedslr.core.errors import FedslrError
from fedslr.core.matrix import LowRank
from fedslr.export.layer_forms import in_forms
from fedslr.export.layer_parts import Layer, stored_parts
from fedslr.models import MODELS

FORMAT = 1
HEADER = "fedslr/header"
MAX_REASON_LETTERS = 300


def encode(about: Mapping[str, Any], layers: Mapping[str, Layer], others: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Return the file of a model, from its layers and the rest of its state dict; and how many numbers it holds."""
    packed = packing.pack({**stored_parts(layers, about["forms"]), "others": dict(others)})
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
    """Return the description, the layers and the rest of the state dict; a ValueError for a damaged file."""
    arrays = encoding.load_arrays(data)
    metadata = json.loads(data[8 : _index_end(data)])["__metadata__"]
    about = json.loads(metadata["fedslr"])
    future = about["format"] != FORMAT
    if future or metadata["sha256"] != _digest(metadata["fedslr"], data):
        why = f"it has format {about['format']!r}; this program reads format {FORMAT}"
        raise FedslrError(why if future else "it is damaged: its SHA-256 does not match; export the model again")
    names = _names(arrays[HEADER])
    tree = packing.unpack({key: arrays[name] for key, name in names.items() if name in arrays})
    parts, added = tree.get("model", {}), tree.get("added", {})
    return about, {name: _layer(part, added.get(name)) for name, part in parts.items()}, tree.get("others", {})


def _layer(part: Tensor | LowRank, added: Tensor | None) -> Layer:
    whole = part if isinstance(part, Tensor) else part.dense()
    whole = whole if added is None else whole + added
    return Layer(whole, part, added) if isinstance(part, LowRank) else Layer(whole, rest=whole)


def load_exported(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Return the model in a safetensors file that `fedslr export` wrote, ready to run; no run folder is needed.

    Args:
        path: The file.
        model: A module of the same architecture, if the model is your own: the file holds its weights, not its code.
            The weights of the module do not matter. A built-in model is built from the file's description.
    """
    try:
        return built(Path(path).read_bytes(), model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        lines = [line.strip().rstrip(".") for line in str(error).splitlines()]
        why = ("it has no " if isinstance(error, KeyError) else "") + " ".join(lines)[:MAX_REASON_LETTERS]
        wanted = "give the file that `fedslr export` wrote and, for a model of your own, a module of its architecture"
        raise FedslrError(f"{path}: cannot be loaded: {why}; {wanted}") from error


def built(data: bytes, model: nn.Module | None = None) -> nn.Module:
    """Return the model in a file's bytes, its layers in the forms that the description names."""
    about, layers, others = decode(data)
    made = copy.deepcopy(_template(about["model"]) if model is None else model)
    weights = {**{name: layer.whole for name, layer in layers.items()}, **others}
    made.load_state_dict(weights, strict=True, assign=True)
    return in_forms(made, layers, about["forms"])


def _template(kind: Mapping[str, Any]) -> nn.Module:
    """Return the built-in architecture of this name, without weights. A file names no code but fedslr's."""
    if kind["name"] not in MODELS:
        raise FedslrError("it holds the weights of a model of your own, whose module is not given")
    # A wrong size takes no memory on this device; the weights will not fit it.
    with torch.device("meta"):
        return MODELS[kind["name"]](tuple(kind["input_shape"]), kind["classes"])
