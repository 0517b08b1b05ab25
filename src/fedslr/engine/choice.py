"""Which engine runs a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedslr.config import Settings
from fedslr.data.federation import ClientData
from fedslr.data.normalization import Normalization
from fedslr.engine.batched import Batched
from fedslr.engine.compiled import Compiled
from fedslr.engine.cuda import Cuda
from fedslr.engine.eager import Eager
from fedslr.errors import FedslrError
from fedslr.types import Algorithm, Task


def choose(
    settings: Settings,
    algorithm: Algorithm[Any, Any],
    task: Task,
    clients: Sequence[ClientData],
    crop_padding: int,
    normalization: Normalization | None,
) -> Eager:
    """The engine that was asked for; by itself, the CUDA engine on a GPU and the plain one elsewhere."""
    device = clients[0].y.device
    on_gpu = device.type == "cuda"
    if settings.engine == "cuda" and not on_gpu:
        raise FedslrError("engine: got 'cuda', but this run is not on a GPU; try auto, or device = 'cuda'")
    if settings.precision != "float32" and not on_gpu:
        raise FedslrError(f"precision: got '{settings.precision}', which only a GPU has; expected float32")
    run = (algorithm, task, clients, settings.batch_size, settings.seed, crop_padding, normalization)
    if on_gpu:
        torch.backends.cudnn.allow_tf32 = settings.precision != "float32"
        torch.backends.cuda.matmul.allow_tf32 = settings.precision != "float32"
        if settings.engine in ("auto", "cuda"):
            return Cuda(*run, precision=settings.precision)
    if settings.compile:
        return Compiled(*run)
    return Batched(*run) if settings.engine == "batched" else Eager(*run)
