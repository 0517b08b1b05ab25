"""The runtimes of a model (torch and onnxruntime), and the milliseconds that they take for a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.core.seeds import leave_capture
from fedslr.export import programs

WARM_UP_CALLS = 3
Call = Callable[[], Any]


def milliseconds(calls: Mapping[str, Call], repeat: int) -> dict[str, float]:
    """Return the median time of every call. Calls take turns, so that other load on the machine slows all alike."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP_CALLS + repeat):
        for name, call in calls.items():
            begun = perf_counter()
            call()
            if turn >= WARM_UP_CALLS:
                took[name].append(1000 * (perf_counter() - begun))
    return {name: median(times) for name, times in took.items()}


class Runtime:
    """A program that runs models on a device."""

    name: str
    sparse = False
    """Whether it can run sparse products."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        """Return a call that runs a model, or one layer, on a batch."""
        raise NotImplementedError


class Torch(Runtime):
    name = "torch"
    sparse = True

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        placed, batch = model.to(self.device), x.to(self.device)

        def call() -> None:
            with torch.inference_mode():
                placed(batch)
            if batch.is_cuda:
                torch.cuda.synchronize(batch.device)

        return call


class RecordedTorch(Torch):
    """Torch on a GPU as a CUDA graph, because small batches wait for Python longer than for the GPU.

    A model that cannot be captured runs without a graph.
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
            # The graph works in the memory of these tensors, so they must stay alive.
            return placed, batch, answers

        return replay


class OnnxRuntime(Runtime):
    name = "onnxruntime"

    def ready(self, model: nn.Module, x: Tensor) -> Call:
        session = programs.session(programs.onnx_bytes(model.cpu(), x.cpu()), self.device)
        given = {session.get_inputs()[0].name: x.cpu().numpy()}
        return lambda: session.run(None, given)


def runtimes(device: str | None = None) -> list[Runtime]:
    """Return the runtimes of this machine: torch and, if it is installed, onnxruntime; on the CPU and on a GPU."""
    known = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if device not in (None, *known):
        raise FedslrError(f"device: got '{device}', expected {' or '.join(known)}; leave it out to use every device")
    found: list[Runtime] = [Torch()]
    if "cuda" in known:
        found += [Torch("cuda"), RecordedTorch("cuda")]
    if programs.has_onnx():
        found += [OnnxRuntime(device) for device in programs.onnx_devices()]
    return [runtime for runtime in found if device in (None, runtime.device)]
