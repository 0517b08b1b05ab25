"""What the machine lends this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def failure(error: BaseException) -> str | None:
    """A line for what the machine failed at: a full memory, a GPU that gave up; None for any other error."""
    words = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("CUDA error: out of" in words or "_STATUS_ALLOC_FAILED" in words)
    ):
        return (
            "not enough memory on the GPU; fewer clients_per_round, a smaller batch_size, fewer epochs, a "
            "memory_budget or engine = 'eager' need less"
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in words):
        return f"not enough memory: {words or 'none is left'}; fewer epochs, smaller data or engine = 'eager' need less"
    if isinstance(error, RuntimeError) and (found := re.search(r"(?:CUDA|HIP) error: *([^\n]*)", str(error))):
        # The lines after it are advice to people who write kernels.
        what = found[1].rstrip(". ")
        if "assert" in what:
            return f"the GPU gave up: {what}; most likely an index is out of range, and device = 'cpu' shows where"
        if "illegal" in what or "launch failure" in what or "misaligned" in what or "ECC" in what:
            return (
                f"the GPU gave up: {what}; a process that was killed while it shared the card can be the cause; a run "
                "goes on with --resume"
            )
        return f"the GPU gave up: {what}"
    return None


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Here PyTorch draws what the seed says, and elsewhere as if nothing had been drawn."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed would seed every device there is, and remember a stack trace where there is none.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield


def leave_capture(device: torch.device | str) -> None:
    """Let random numbers be drawn on a GPU again after a capture of its launches has failed.

    PyTorch's generator is then still marked as captured, and refuses; a copy of its state is not.
    """
    torch.cuda.synchronize(device)
    index = torch.device(device).index
    generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    generator.graphsafe_set_state(generator.clone_state())
