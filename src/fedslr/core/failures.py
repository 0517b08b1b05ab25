"""One plain line for a failure of the machine, such as a full GPU memory."""

from __future__ import annotations

import re

import torch


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
