"""What the machine lends this process."""

from __future__ import annotations

import os

import torch


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lacks_memory(error: BaseException) -> str | None:
    """A line for what failed because a memory is full; None for any other error."""
    words = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "CUDA error: out of" in words):
        return (
            "not enough memory on the GPU; fewer clients_per_round, a smaller batch_size, fewer epochs, a "
            "memory_budget or engine = 'eager' need less"
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in words):
        return f"not enough memory: {words or 'none is left'}; fewer epochs, smaller data or engine = 'eager' need less"
    return None


def leave_capture(device: torch.device | str) -> None:
    """Let random numbers be drawn on a GPU again after a capture of its launches has failed.

    PyTorch's generator is then still marked as captured, and refuses; a copy of its state is not.
    """
    torch.cuda.synchronize(device)
    index = torch.device(device).index
    generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    generator.graphsafe_set_state(generator.clone_state())
