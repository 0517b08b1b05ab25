"""The preparation of a run: the model on its device, the loss, the clients' data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedslr import models
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError
from fedslr.core.group import Group
from fedslr.core.problem import Problem
from fedslr.core.types import Loss
from fedslr.data.federation import Federation, clients_on_device
from fedslr.engine import preflight
from fedslr.engine.settings import Settings
from fedslr.engine.workload import Workload
from fedslr.tasks import losses


def workload(
    algorithm: Algorithm[Any, Any, Any],
    federation: Federation,
    model: str | nn.Module,
    settings: Settings,
    *,
    loss: Loss | None,
    group: Group,
    warn: Callable[[str], None],
) -> Workload:
    """Return the description of a run that its engine is made from; refuse a model or a method that cannot run."""
    device, dtype = settings.torch_device(), settings.torch_dtype()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and graphs run on the current device
    module = models.build(model, federation.input_shape, federation.num_classes, settings.seed).to(device, dtype)
    loss = loss or losses.find(settings.loss)
    for warning in preflight.check(module, federation, loss):
        warn(warning)
    if settings.diagnostics and not algorithm.has_diagnostics:
        raise FedslrError(f"diagnostics: {algorithm.name} has no convergence theory here; set diagnostics = false")
    if group.size > 1 and settings.diagnostics:
        raise FedslrError("diagnostics: they need all clients in one process; run without torchrun")
    if group.size > 1 and settings.device.startswith("cuda:"):
        raise FedslrError(f"device: got '{settings.device}', but each process has its own; expected auto, cuda or cpu")
    examples = [len(c.y) for c in federation.clients]
    return Workload(
        algorithm=algorithm,
        problem=Problem(module, loss, settings.weight_decay),
        clients=clients_on_device(federation, device, dtype),
        batch_size=settings.batch_size,
        seed=settings.seed,
        crop_padding=federation.crop_padding,
        normalization=federation.normalization,
        examples=examples,
        usual_cohort=-(-settings.cohort_size(len(examples)) // group.size),
        precision=settings.settled().precision,
        loss_is_mean=loss in losses.LOSSES.values(),
    )
