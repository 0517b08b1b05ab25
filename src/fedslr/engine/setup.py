"""The preparation of a run: the model on its device, the loss, the clients' data, and the engine."""

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
from fedslr.core.types import Loss, Steps, count_batches
from fedslr.data.described import DescribedFederation
from fedslr.data.device_clients import clients_on_device
from fedslr.data.federation import Federation
from fedslr.engine import preflight
from fedslr.engine.batched import Batched
from fedslr.engine.cuda import Cuda
from fedslr.engine.eager import Eager
from fedslr.engine.settings import Settings
from fedslr.engine.workload import Workload
from fedslr.tasks.scoring import Scorer

MAX_COHORT_PARAMETERS = 2**22
"""Parameters in the models of a cohort up to which a CPU trains them faster together."""

MIN_COHORT = 4
"""Clients from which on training them together is faster."""

PLAIN_STEPS = {
    "global": 'optimizer = "sgd" and grad_clip = 0',
    "personal": 'personal = { optimizer = "sgd", grad_clip = 0 }',
}
"""The settings that make the local steps of a phase plain SGD."""

MAX_ROUND_INPUTS = 2**28
"""Numbers in the batches of a round up to which all may be made before it: one GiB in float32."""


def require_possible(settings: Settings, algorithm: Algorithm[Any, Any, Any], group: Group) -> None:
    """Refuse settings that contradict each other, the method or the machine, before any data are read."""
    on_gpu = settings.torch_device().type == "cuda"
    if settings.engine == "cuda" and not on_gpu:
        raise FedslrError("engine: got 'cuda', but this run is not on a GPU; try auto, or device = 'cuda'")
    if settings.precision not in ("auto", "float32") and not on_gpu:
        raise FedslrError(f"precision: got '{settings.precision}', which only a GPU has; expected auto or float32")
    if settings.precision in ("tf32", "bf16") and settings.dtype != "float32":
        raise FedslrError(
            f"precision: got '{settings.precision}', but dtype = '{settings.dtype}' is multiplied exactly; "
            "expected auto or float32"
        )
    require_optimizers(settings, algorithm)
    if settings.diagnostics and not algorithm.has_diagnostics:
        raise FedslrError(f"diagnostics: {algorithm.name} has no convergence theory here; set diagnostics = false")
    if group.size > 1 and settings.diagnostics:
        raise FedslrError("diagnostics: they need all clients in one process; run without torchrun")
    if group.size > 1 and settings.device.startswith("cuda:"):
        raise FedslrError(f"device: got '{settings.device}', but each process has its own; expected auto, cuda or cpu")
    if group.size > 1 and algorithm.server_sees == "each":
        raise FedslrError("torchrun: this method's server must see every upload; run it in one process")


def require_optimizers(settings: Settings, algorithm: Algorithm[Any, Any, Any]) -> None:
    """Refuse optimizers, of clients or of the server, that a method cannot use."""
    if settings.server_optimizer is not None and not algorithm.averages():
        raise FedslrError(
            f"server_optimizer: got '{settings.server_optimizer.name}', but the server of {algorithm.name} does more "
            "than average; leave it out, or choose a method such as fedavg"
        )
    by_phase = {"global": settings.steps(), "personal": settings.steps_of_personal_phase()}
    for phase in algorithm.plain_sgd:
        steps = by_phase[phase]
        if not steps.is_plain:
            clipped = f" with grad_clip = {steps.grad_clip:g}" if steps.grad_clip else ""
            raise FedslrError(
                f"optimizer: got '{steps.optimizer.name}'{clipped}, but {algorithm.name}'s {phase} phase needs sgd "
                f"without grad_clip; set {PLAIN_STEPS[phase]}"
            )


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
    """Return the description of a run that its engine is made from; refuse a model that cannot run."""
    device, dtype = settings.torch_device(), settings.torch_dtype()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and graphs run on the current device
    module = models.build(model, federation.input_shape, federation.outputs, settings.seed).to(device, dtype)
    settings = settings.for_task(federation.task)
    loss, per_sample = loss or settings.loss_function(), True
    if not isinstance(federation, DescribedFederation):
        checked = preflight.check(module, federation, loss)
        per_sample = checked.loss_per_sample
        for warning in checked.warnings:
            warn(warning)
    examples = [samples for samples, _ in federation.sizes]
    return Workload(
        algorithm=algorithm,
        problem=Problem(module, loss, settings.weight_decay, settings.steps(), settings.steps_of_personal_phase()),
        server_optimizer=settings.server_optimizer,
        clients=clients_on_device(federation, device, dtype),
        batch_size=settings.batch_size,
        seed=settings.seed,
        crop_padding=federation.crop_padding,
        normalization=federation.normalization,
        examples=examples,
        usual_cohort=-(-settings.cohort_size(len(examples)) // group.size),
        precision=settings.with_resolved_precision().precision,
        loss_per_sample=per_sample,
        scorer=Scorer(federation.task, loss, settings.metrics),
    )


def choose_engine(settings: Settings, work: Workload, warn: Callable[[str], None]) -> Eager:
    """Return the engine that was asked for; `auto` takes the CUDA engine on a GPU and the faster one on a CPU."""
    on_gpu = work.device.type == "cuda"
    if on_gpu:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        work.problem.tf32 = work.precision != "float32"
        if settings.engine in ("auto", "cuda"):
            return Cuda(work, asked=settings.engine, warn=warn)
    if settings.engine == "batched" or (
        settings.engine == "auto" and not on_gpu and batching_is_faster(settings, work)
    ):
        return Batched(work, asked=settings.engine, warn=warn)
    return Eager(work)


def batching_is_faster(settings: Settings, work: Workload) -> bool:
    """Return whether a CPU should train a cohort together: small models, several clients, similar amounts of work.

    Batching saves the overhead of many small operations, so models must be small. Clients that have done their steps
    wait for the one that has most, so the mean number of steps must be at least half the largest. All batches of a
    round are in memory at once. The rule measures no time: engines differ in the last bits, and a run must not depend
    on how busy a machine is.
    """
    cohort = settings.cohort_size(len(work.examples))
    parameters = sum(p.numel() for p in work.problem.model.parameters())
    steps = [-(-n // settings.batch_size) for n in work.examples]
    first = settings.round(0)
    batches = sum(count_batches(amount, max(steps)) for amount in (first.epochs, first.personal_epochs))
    inputs = cohort * batches * settings.batch_size * work.clients[0].x.shape[1:].numel()
    balanced = isinstance(first.epochs, Steps) or 2 * sum(steps) >= max(steps) * len(steps)
    return (
        cohort >= MIN_COHORT
        and cohort * parameters <= MAX_COHORT_PARAMETERS
        and inputs <= MAX_ROUND_INPUTS
        and balanced
    )
