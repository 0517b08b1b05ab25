"""The settings that all methods share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from fedslr.core import plugins, schema
from fedslr.core.errors import FedslrError
from fedslr.core.optimizers import OPTIMIZERS, PLAIN_SGD, LocalSteps, Optimizer
from fedslr.core.schema import (
    Choice,
    Rule,
    countable,
    countable_from_zero,
    fraction,
    memory_size,
    non_negative,
    one_of,
    positive,
    seed_range,
    share,
)
from fedslr.core.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from fedslr.core.types import Loss, Round, Steps
from fedslr.engine import selection
from fedslr.engine.schedules import EXPONENTIAL, SCHEDULES, Course, Schedule
from fedslr.tasks import TASKS, loss_of, losses, metrics_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


DEFAULT_COHORT = 10


CUSTOM = "custom"
"""The selection or the loss of a run that was given a function, which a recipe cannot name."""


def _function_name(known: Collection[str]) -> Rule:
    words = f"one of {', '.join(known)}, or module:function of your own"
    return Rule(words, lambda v: v in (*known, CUSTOM) or plugins.is_name(v))


selection_name, loss_name = _function_name(selection.SELECTIONS), _function_name(losses.LOSSES)


@dataclass(frozen=True)
class Settings:
    """The settings that all methods share: keywords of `fedslr.run` and keys of a recipe. Defaults are the paper's."""

    rounds: Annotated[int, countable, "communication rounds"] = 1000
    clients_per_round: Annotated[int | None, countable, "cohort size; 10, or all where there are fewer"] = None
    batch_size: Annotated[int, countable, "samples per local step"] = 20
    epochs: Annotated[int, countable, "local passes for the global part"] = 2
    personal_epochs: Annotated[int, countable_from_zero, "local passes for a personal part"] = 1
    local_steps: Annotated[int | None, countable, "batches for the global part, in place of epochs"] = None
    personal_steps: Annotated[int | None, countable, "batches for a personal part, in place of personal_epochs"] = None
    lr: Annotated[float, positive, "local step size of the first round"] = 0.1
    lr_decay: Annotated[float, fraction, "factor of the step size per round, for the schedule exponential"] = 0.998
    schedule: Annotated[Schedule, Choice(SCHEDULES, "exponential"), "how lr changes from round to round"] = EXPONENTIAL
    optimizer: Annotated[Optimizer, Choice(OPTIMIZERS, "sgd"), "how gradients become local steps"] = PLAIN_SGD.optimizer
    grad_clip: Annotated[float, non_negative, "largest norm of the gradient of a local step; 0: no limit"] = 0.0
    personal_lr: Annotated[float | None, positive, "lr of the personal phase; lr unless given"] = None
    personal_optimizer: Annotated[
        Optimizer | None, Choice(OPTIMIZERS, "sgd"), "optimizer of the personal phase; optimizer unless given"
    ] = None
    personal_grad_clip: Annotated[
        float | None, non_negative, "grad_clip of the personal phase; grad_clip unless given"
    ] = None
    server_optimizer: Annotated[
        ServerOptimizer | None, Choice(SERVER_OPTIMIZERS), "how a server that averages uses the mean update"
    ] = None
    weight_decay: Annotated[float, non_negative, "weight of ½‖v‖² in every local loss"] = 1e-3
    task: Annotated[str | None, one_of(*TASKS), "kind of labels; classification unless the data say otherwise"] = None
    loss: Annotated[str | None, loss_name, "what local training makes small; the task's own unless given"] = None
    label_smoothing: Annotated[float, share, "probability that cross_entropy and bce spread over all labels"] = 0.0
    class_weights: Annotated[tuple[float, ...], "weights of the classes in cross_entropy, or of label 1 in bce"] = ()
    metrics: Annotated[tuple[str, ...], "figures of every evaluation, the headline first; the task's unless given"] = ()
    selection: Annotated[str, selection_name, "how a round's clients are drawn"] = "uniform"
    seed: Annotated[int, seed_range, "of split, start, cohorts and batches"] = 0
    device: Annotated[str, "auto, cpu, cuda, cuda:1, …"] = "auto"
    dtype: Annotated[str, one_of(*DTYPES), "type of all numbers that are kept"] = "float32"
    engine: Annotated[str, one_of("auto", "eager", "batched", "cuda"), "how a cohort is trained"] = "auto"
    precision: Annotated[
        str, one_of("auto", "float32", "tf32", "bf16"), "of float32 products on a GPU; auto: bf16 where it has it"
    ] = "auto"
    store: Annotated[str, one_of("memory", "disk"), "where clients' states live while the run goes on"] = "memory"
    memory_budget: Annotated[
        int | str | None, memory_size, "memory for clients' states; the rest is on disk; no limit unless given"
    ] = None
    diagnostics: Annotated[bool, "record the quantities of the convergence theory on evaluation rounds"] = False
    evaluate_every: Annotated[int, countable, "rounds between evaluations; the last round always is one"] = 5
    evaluate_clients: Annotated[int | None, countable, "clients evaluated, always the same; all unless given"] = None
    checkpoint_every: Annotated[int, countable, "rounds between checkpoints"] = 1
    checkpoint_minutes: Annotated[
        float, non_negative, "minutes between checkpoints, at least; the last round is always saved"
    ] = 0.0

    def __post_init__(self) -> None:
        if self.store == "disk" and self.memory_budget is not None:
            raise FedslrError(
                "memory_budget: store = 'disk' keeps no states in memory; expected store = 'memory' or no budget"
            )

    def for_task(self, task: str) -> Settings:
        """Return these settings with a task, and with its loss and metrics if none were asked for."""
        return replace(self, task=task, loss=loss_of(task, self.loss), metrics=metrics_of(task, self.metrics))

    def loss_function(self) -> Loss:
        """Return the loss by its name."""
        return losses.find(str(self.loss), {"weights": self.class_weights, "smoothing": self.label_smoothing})

    def memory_bytes(self) -> int | None:
        """Bytes that clients' states may take in memory, those in use aside; None is no limit."""
        if self.store == "disk":
            return 0
        return None if self.memory_budget is None else schema.in_bytes(self.memory_budget)

    def cohort_size(self, num_clients: int) -> int:
        if self.clients_per_round is None:
            return min(DEFAULT_COHORT, num_clients)
        if self.clients_per_round > num_clients:
            raise FedslrError(
                f"clients_per_round: got {self.clients_per_round}, but there are only {num_clients} clients; "
                f"expected 1 to {num_clients}"
            )
        return self.clients_per_round

    def round(self, number: int) -> Round:
        """Return the step sizes and the amounts of training of a round, counted from 0."""
        decay = self.schedule.ratio(number, Course(self.rounds, self.lr, self.lr_decay))
        return Round(
            number,
            self.rounds,
            self.lr * decay,
            decay,
            self.epochs if self.local_steps is None else Steps(self.local_steps),
            self.personal_epochs if self.personal_steps is None else Steps(self.personal_steps),
            1.0 if self.personal_lr is None else self.personal_lr / self.lr,
        )

    def steps(self) -> LocalSteps:
        """Return how gradients become steps in the global phase."""
        return LocalSteps(self.optimizer, self.grad_clip)

    def steps_of_personal_phase(self) -> LocalSteps:
        """Return how gradients become steps in the personal phase."""
        clip = self.grad_clip if self.personal_grad_clip is None else self.personal_grad_clip
        return LocalSteps(self.personal_optimizer or self.optimizer, clip)

    def is_evaluated(self, done: int) -> bool:
        """Return whether clients are evaluated after this many rounds."""
        return done % self.evaluate_every == 0 or done == self.rounds

    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def with_resolved_precision(self) -> Settings:
        """Return these settings with `precision = "auto"` replaced by the precision of this machine.

        The CUDA engine multiplies in bfloat16, the others exactly; results/precision shows the effect on training.
        """
        if self.precision != "auto":
            return self
        fast = self.engine in ("auto", "cuda") and self.dtype == "float32" and self.torch_device().type == "cuda"
        rounded = fast and torch.cuda.is_bf16_supported(including_emulation=False)
        return replace(self, precision="bf16" if rounded else "float32")

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise FedslrError(f"device: got '{self.device}', which this machine cannot use; try auto or cpu") from error
        return device
