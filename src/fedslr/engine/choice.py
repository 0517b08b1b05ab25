"""Which engine runs a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.problem import Task
from fedslr.data.federation import ClientData
from fedslr.data.normalization import Normalization
from fedslr.engine.batched import Batched
from fedslr.engine.compiled import Compiled
from fedslr.engine.cuda import Cuda
from fedslr.engine.eager import Eager
from fedslr.engine.settings import Settings


def choose(
    settings: Settings,
    algorithm: Algorithm[Any, Any],
    task: Task,
    clients: Sequence[ClientData],
    examples: Sequence[int],
    crop_padding: int,
    normalization: Normalization | None,
    usual: int,
) -> Eager:
    """The engine that was asked for; by itself, the CUDA engine on a GPU, and elsewhere the batched one if it pays."""
    device = clients[0].y.device
    on_gpu = device.type == "cuda"
    if settings.engine == "cuda" and not on_gpu:
        raise FedslrError("engine: got 'cuda', but this run is not on a GPU; try auto, or device = 'cuda'")
    if settings.precision not in ("auto", "float32") and not on_gpu:
        raise FedslrError(f"precision: got '{settings.precision}', which only a GPU has; expected auto or float32")
    if settings.precision in ("tf32", "bf16") and settings.dtype != "float32":
        raise FedslrError(
            f"precision: got '{settings.precision}', but dtype = '{settings.dtype}' is multiplied exactly; "
            "expected auto or float32"
        )
    if settings.compile and (on_gpu or settings.engine == "eager"):
        why = "a GPU's engine compiles by itself" if on_gpu else "engine = 'eager' runs methods as they are written"
        raise FedslrError(f"compile: got true, but {why}; expected false")
    run = (algorithm, task, clients, settings.batch_size, settings.seed, crop_padding, normalization)
    if on_gpu:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        products = settings.settled().precision
        task.tf32 = products != "float32"
        if settings.engine in ("auto", "cuda"):
            return Cuda(*run, precision=products, examples=examples, usual=usual)
    if settings.compile:
        return Compiled(*run, examples=examples, usual=usual)
    together = settings.engine == "batched" or (
        settings.engine == "auto" and not on_gpu and pays(settings, task, examples, clients[0].x.shape[1:].numel())
    )
    return Batched(*run, examples=examples, usual=usual) if together else Eager(*run)


SMALL = 2**22
"""Numbers in the models of a cohort up to which a CPU trains them faster together."""

FEW = 4
"""Clients from which on it is worth while."""

ROOM = 2**28
"""Numbers in the batches of a round up to which they may all be made before it: one GiB in float32."""


def pays(settings: Settings, task: Task, examples: Sequence[int], sample: int) -> bool:
    """Whether a CPU should train a cohort together: small models, several clients, about as much work for each.

    What is saved is the overhead of many small operations, so models must be small; clients that have done their steps
    wait for the one that has most, so the mean number of steps must be at least half the largest. All batches of a
    round, with so many numbers per sample, are in memory at once. The rule reads no clock: engines differ in the last
    bits, and a run must not depend on how busy a machine is.
    """
    cohort = settings.cohort_size(len(examples))
    numbers = sum(p.numel() for p in task.model.parameters())
    steps = [-(-n // settings.batch_size) for n in examples]
    passes = settings.epochs + settings.personal_epochs
    batches = cohort * passes * max(steps) * settings.batch_size * sample
    alike = 2 * sum(steps) >= max(steps) * len(steps)
    return cohort >= FEW and cohort * numbers <= SMALL and batches <= ROOM and alike
