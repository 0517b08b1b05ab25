"""Milliseconds that a model takes for a batch, with torch or with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.core.generators import leave_capture
from fedslr.export import programs

WARM_UP = 3
Call = Callable[[], Any]


def milliseconds(calls: Mapping[str, Call], repeat: int) -> dict[str, float]:
    """The median of every call, after a warm-up. Calls take turns, so that what else a machine does slows all alike."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + repeat):
        for name, call in calls.items():
            begun = perf_counter()
            call()
            if turn >= WARM_UP:
                took[name].append(1000 * (perf_counter() - begun))
    return {name: median(times) for name, times in took.items()}


class Runtime(Protocol):
    """What runs models."""

    name: str
    device: str
    sparse: bool
    """Whether it knows sparse products."""

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        """A call that runs a model, or a layer of one, on a batch."""
        ...


class Torch:
    name = "torch"
    sparse = True

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        placed, batch = model.to(self.device), x.to(self.device)

        def call() -> None:
            with torch.inference_mode():
                placed(batch)
            if batch.is_cuda:
                torch.cuda.synchronize(batch.device)

        return call


class Recorded(Torch):
    """Torch on a GPU, its launches recorded once and replayed: small batches wait for Python more than for the GPU.

    What cannot be recorded is run as it is.
    """

    name = "recorded"
    sparse = False

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        plain = super().ready(model, x)
        plain()
        placed, batch, graph = model.to(self.device), x.to(self.device), torch.cuda.CUDAGraph()
        try:
            with torch.inference_mode(), torch.cuda.graph(graph):
                answers: Tensor = placed(batch)
        except RuntimeError:
            leave_capture(self.device)
            return plain

        def replay() -> tuple[nn.Module, Tensor, Tensor]:
            graph.replay()
            torch.cuda.synchronize(batch.device)
            # The graph works in their memory, which must not be given to others.
            return placed, batch, answers

        return replay


class OnnxRuntime:
    name = "onnxruntime"
    sparse = False

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        with programs.in_one_line("an ONNX file"):
            session = programs.session(programs.onnx_bytes(model.cpu(), x.cpu()), self.device)
        given = {session.get_inputs()[0].name: x.cpu().numpy()}
        return lambda: session.run(None, given)


def runtimes(device: str | None = None) -> list[Runtime]:
    """All there are on this machine: torch and, where it is installed, onnxruntime; on the CPU and on a GPU."""
    if device not in (None, "cpu", "cuda"):
        raise FedslrError(f"device: got '{device}', expected cpu, cuda or nothing for all there are")
    if device == "cuda" and not torch.cuda.is_available():
        raise FedslrError("device: got 'cuda', but there is no GPU that PyTorch can use; expected cpu")
    found: list[Runtime] = [Torch()]
    if torch.cuda.is_available():
        found += [Torch("cuda"), Recorded("cuda")]
    if programs.has_onnx():
        found += [OnnxRuntime(device) for device in programs.onnx_devices()]
    return [runtime for runtime in found if device in (None, runtime.device)]
