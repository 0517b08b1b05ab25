"""Models as programs of torch.export, and the rules that all exporters of programs share."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError

EXAMPLE_BATCH = 2
"""Samples in the batch that exporters trace a model with."""
MAX_BATCH = 2**16
"""Samples in the largest batch that a torch program takes."""
FIXED_BATCH = "it would take batches of one size only; expected --format safetensors, which takes any"
FIXED_BATCH_OF_TORCH = "Constraints violated (batch)"
"""The message of torch.export for such a model."""
NO_FLOAT64 = (
    "; onnxruntime runs few kinds of layers in float64: expected a run with dtype = 'float32', or another format"
)
CODE_ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
"""The metadata in which torch.export stores the source code of an operation."""
Answers = Callable[[Tensor], Tensor]


def example(x: Tensor) -> tuple[tuple[Tensor], tuple[dict[int, Any]]]:
    """Return a batch of zeros to trace a model with, because archives store it, and the axis that may change."""
    return (x.new_zeros(EXAMPLE_BATCH, *x.shape[1:]),), ({0: torch.export.Dim("batch", min=1, max=MAX_BATCH)},)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an exporter's exception into an error of one line."""
    try:
        yield
    except Exception as error:
        why = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        why = FIXED_BATCH if FIXED_BATCH_OF_TORCH in why else why + (NO_FLOAT64 if "NOT_IMPLEMENTED" in why else "")
        raise FedslrError(f"format: this model cannot be made {what}: {why}") from error


@contextmanager
def exporting(what: str) -> Iterator[None]:
    """Run an exporter without gradients and without fused operations that it does not know."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), without_warnings(), explained(what):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def require_any_batch(answers: Answers, x: Tensor) -> None:
    """Refuse a program that takes only batches of the example's size; some exporters make such silently."""
    batch = x[:1].repeat(EXAMPLE_BATCH + 1, *(1 for _ in x.shape[1:]))
    answers(batch[:EXAMPLE_BATCH])
    try:
        answers(batch[:1])
        answers(batch)
    except Exception:
        raise ValueError(FIXED_BATCH) from None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence exporters, which warn of missing optional packages and of their own use of torch."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def torch_bytes(model: nn.Module, x: Tensor) -> bytes:
    """Return a model as an archive of torch.export; `torch.export.load(path).module()` runs it."""
    batch, shapes = example(x)
    file = io.BytesIO()
    with exporting("a torch program"):
        program = torch.export.export(model, batch, dynamic_shapes=shapes)
        for node in program.graph.nodes:
            for origin in CODE_ORIGINS:
                node.meta.pop(origin, None)
        torch.export.save(program, file)
        require_any_batch(torch_answers(file.getvalue()), x)
    return file.getvalue()


def torch_answers(data: bytes) -> Answers:
    """Return the function that a torch program computes."""
    with without_warnings():
        loaded = torch.export.load(io.BytesIO(data)).module()
    return lambda x: loaded(x)
