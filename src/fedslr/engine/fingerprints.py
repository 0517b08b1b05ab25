"""Digests that tell whether a resumed run has the data and the model that it began with."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from fedslr.core.types import Params
from fedslr.data.described import DescribedFederation
from fedslr.data.federation import Federation


def of_data(federation: Federation) -> str:
    """Return the digest of all samples and of how they are prepared."""
    if isinstance(federation, DescribedFederation):
        return federation.digest
    digest = hashlib.sha256(repr((federation.normalization, federation.crop_padding)).encode())
    for client in federation.clients:
        for part in (tensor for _, x, y in client.parts() for tensor in (x, y)):
            digest.update(str(tuple(part.shape)).encode())
            digest.update(_bytes(part))
    return digest.hexdigest()


def of_model(model: nn.Module) -> str:
    """Return the digest of a model's layers, its parameters' shapes and its values that do not train."""
    digest = hashlib.sha256(repr(model).encode())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, x in model.state_dict().items():
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        if name not in trained:
            digest.update(_bytes(x))
    return digest.hexdigest()


def of_params(params: Params) -> str:
    """Return the digest of parameters."""
    return hashlib.sha256(b"".join(_bytes(x) for x in params.values())).hexdigest()


def function_name(function: Any) -> str:
    """Return the name of a function or class and of its module."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _bytes(x: torch.Tensor) -> bytes:
    """Return the memory of a tensor of any element type."""
    return x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
