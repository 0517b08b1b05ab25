"""A model in a safetensors file: every layer in its fewest bytes, and a description from which it is built again.

Layers are named as in the model's state dict: `conv.weight` where it is stored in full, `conv.weight.u` and `.v` where
it is stored as factors, `.values` with `.bitmap` or `.indices` where most of it is zero; `added/conv.weight…` is to be
added to the factors. The encodings are the wire's, and `fedslr/header` lists them as its messages do. The file's
metadata has the description, as JSON, under the key `fedslr`; there `sha256` is that of all tensors' bytes.
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
from fedslr.core.errors import FedslrError, WireError
from fedslr.core.matrix import LowRank
from fedslr.export.forms import Forms, alternatives, convertible, shaped
from fedslr.export.parts import Layer, pieces
from fedslr.models import MODELS

FORMAT = 1
HEADER = "fedslr/header"
LONGEST = 300
"""Letters of what is wrong with some weights."""


class FileError(FedslrError):
    """A file that is no exported model, or a damaged one."""


def encode(about: Mapping[str, Any], layers: Mapping[str, Layer], others: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """The file of a model, from its layers and what else its state dict has; and how many numbers are in it."""
    packed = packing.pack({**pieces(layers, about["forms"]), "others": dict(others)})
    names = _names(packed.arrays["header"])
    arrays = {names[key]: np.asarray(array, order="C") for key, array in packed.arrays.items()}
    digest = _digest(safetensors.numpy.save(arrays))
    text = json.dumps({"format": FORMAT, "sha256": digest, **about}, separators=(",", ":"))
    return safetensors.numpy.save(arrays, {"fedslr": text}), packed.numbers


def _digest(data: bytes) -> str:
    """The SHA-256 of all tensors of a safetensors file: of what follows its index."""
    return hashlib.sha256(memoryview(data)[_index_end(data) :]).hexdigest()


def _index_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _names(header: layout.Array) -> dict[str, str]:
    """What the wire's arrays are called in a file."""
    names = {"header": HEADER}
    for i, (path, *_) in enumerate(json.loads(header.tobytes())):
        name = "/".join(path if path[0] == "added" else path[1:])
        names |= {f"{i}{ending}": f"{name}{ending}" for ending in layout.ENDINGS}
    return names


def decode(data: bytes) -> tuple[dict[str, Any], dict[str, Layer], dict[str, Tensor]]:
    """The description, the layers and the rest of the state dict; a FileError for anything but such a file."""
    try:
        arrays = encoding.load_arrays(data)
        about = json.loads(json.loads(data[8 : _index_end(data)])["__metadata__"]["fedslr"])
        if about["format"] != FORMAT:
            raise FileError(f"it has format {about['format']!r}; this program reads format {FORMAT}")
        # Files of before there were digests have none.
        if "sha256" in about and about["sha256"] != _digest(data):
            raise FileError("its numbers are not those that were exported: their SHA-256 does not match; export again")
        names = _names(arrays[HEADER])
        tree = packing.unpack({key: arrays[name] for key, name in names.items() if name in arrays})
        parts, added = tree.get("model", {}), tree.get("added", {})
        return about, {name: _layer(part, added.get(name)) for name, part in parts.items()}, tree.get("others", {})
    except (WireError, KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"it is no model that fedslr exported, or a damaged one ({_first_line(error)})") from error


def _layer(part: Tensor | LowRank, added: Tensor | None) -> Layer:
    whole = part if isinstance(part, Tensor) else part.dense()
    whole = whole if added is None else whole + added
    return Layer(whole, part, added) if isinstance(part, LowRank) else Layer(whole, rest=whole)


def load_exported(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model in a safetensors file that `fedslr export` wrote, ready to be run; no run folder is needed.

    A built-in model is built from the file's description. Of a model of your own the file holds the weights, not the
    code: give a module of the same architecture, whose weights do not matter.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise FedslrError(f"model: got {model!r}, expected a module of the architecture that was exported")
    try:
        return built(Path(path).read_bytes(), model)
    except OSError as error:
        raise FedslrError(f"{path}: cannot be read: {error.strerror}") from None
    except FileError as error:
        raise FileError(f"{path}: {error}") from None


def built(data: bytes, model: nn.Module | None = None) -> nn.Module:
    """The model in a file's bytes, its layers in the forms that the description names."""
    about, layers, others = decode(data)
    template = _template(about) if model is None else model
    try:
        filled = _filled(template, {**{name: layer.whole for name, layer in layers.items()}, **others})
    except (RuntimeError, TypeError) as error:
        # PyTorch's first line says whose, the others what.
        why = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines() if not line.endswith(":"))
        raise FileError(f"its weights do not fit the model: {why[:LONGEST]}") from error
    return shaped(filled, layers, _forms(about, filled, layers))


def _template(about: Mapping[str, Any]) -> nn.Module:
    """The architecture by its name, without weights. A file names no code but ours."""
    kind = about.get("model")
    made = kind if isinstance(kind, dict) else {}
    name, shape, classes = made.get("name"), made.get("input_shape"), made.get("classes")
    if not isinstance(name, str) or name not in MODELS:
        raise FileError("it holds the weights of a model of your own; give the module: load_exported(path, module)")
    try:
        # Sizes that a damaged file makes up take no memory here, and are refused when the weights do not fit.
        with torch.device("meta"):
            return MODELS[name](tuple(shape), classes)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, StopIteration, ArithmeticError) as error:
        raise FileError(f"its description of the model is wrong: {_first_line(error)}") from error


def _filled(template: nn.Module, dense: Mapping[str, Tensor]) -> nn.Module:
    made = copy.deepcopy(template)
    made.load_state_dict(dict(dense), strict=True, assign=True)
    return made


def _forms(about: Mapping[str, Any], model: nn.Module, layers: Mapping[str, Layer]) -> Forms:
    """The forms that the description names, if the layers have them."""
    forms, plains = about.get("forms"), convertible(model)
    if not isinstance(forms, dict):
        raise FileError("its description has no forms")
    for name, form in forms.items():
        known = name in plains and name in layers
        if not known or form not in alternatives(plains[name], layers[name]):
            raise FileError(f"its description gives {name!r} a form that it cannot have")
    return dict(forms)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
