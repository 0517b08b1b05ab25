"""Inference on a node, with the personal model in its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedslr.core.errors import FedslrError, reason
from fedslr.data.client_data import as_tensor, require_finite
from fedslr.data.normalization import UNIT
from fedslr.data.npz_files import read_npz
from fedslr.deploy import options
from fedslr.deploy.messages import EIGHT_BIT, NUMBERS
from fedslr.deploy.node_store import NodeStore
from fedslr.engine.eager import EVALUATION_BATCH


@torch.no_grad()
def scores(store: Path, x: Tensor) -> Tensor:
    """Return the personal model's score of every class for every input."""
    page, evaluated, params = NodeStore(store).last_evaluation()
    asked = options.from_text(page.recipe)
    if tuple(x.shape[1:]) != asked.options.shape:
        got = "x".join(map(str, x.shape[1:]))
        expected = ", ".join(map(str, asked.options.shape))
        raise FedslrError(
            f"x: inputs are {got or 'single numbers'}, the model takes {asked.options.inputs}; give an array of shape "
            f"[samples, {expected}]"
        )
    _require_kind(x, evaluated.inputs)
    problem = asked.problem()
    first = next(problem.model.parameters())
    shown = UNIT(x, first.dtype) if x.dtype == torch.uint8 else x
    parts = shown.to(first.device, first.dtype if shown.is_floating_point() else shown.dtype).split(EVALUATION_BATCH)
    held = {k: p.to(first.device) for k, p in params.items()}
    try:
        return torch.cat([problem.outputs(held, part).cpu() for part in parts])
    except RuntimeError as error:
        kind = str(x.dtype).removeprefix("torch.")
        first_line = str(error).split("\n")[0]
        more = "" if shown.is_floating_point() else "; try x.astype('float32')"
        raise FedslrError(f"x: the model does not take inputs of type {kind}: {first_line}{more}") from error


def _require_kind(x: Tensor, kind: str) -> None:
    """Refuse inputs of another scale than the model was trained on."""
    eight_bit = x.dtype == torch.uint8
    wrong = None
    if kind == NUMBERS and eight_bit:
        wrong = "it is 8-bit, but the training data was not; scale x as the training data and save it as float32"
    if kind == EIGHT_BIT and not eight_bit and bool((x < 0).any() | (x > 1).any()):
        wrong = "the model was trained on 8-bit inputs; give 8-bit inputs (uint8) or numbers from 0 to 1"
    if wrong:
        raise FedslrError(f"x: {wrong}")


def read_inputs(path: Path) -> Tensor:
    """Return the array of a .npy file, or `x` of a .npz file, checked as training data are."""
    x = as_tensor(f"{path}: x", _read_array(path))
    require_finite(f"{path}: x", x)
    if not x.numel():
        raise FedslrError(f"{path}: x is empty, shape {list(x.shape)}; expected inputs, one after another")
    return x


def _read_array(path: Path) -> np.ndarray[Any, Any]:
    if path.suffix == ".npy":
        try:
            with path.open("rb") as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise FedslrError(
                f"{path}: cannot be read as an array: {reason(error)}; give a file of numpy.save"
            ) from None
    if path.suffix != ".npz" and path.exists():
        raise FedslrError(f"{path}: got a file of another kind; expected .npy or .npz, as numpy saves arrays")
    return read_npz(path, ("x",))["x"]
