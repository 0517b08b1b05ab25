"""The machine that a run uses: its cores, and one plain line for a failure such as a full GPU memory."""

from __future__ import annotations

import os
import re

import torch


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


GPU_HINTS = {
    "assert": "; most likely an index is out of range; device = 'cpu' shows the place",
    "illegal|launch failure|misaligned|ECC": "; a possible cause is that a process was killed while it shared the GPU; "
    "continue the run with --resume",
}
"""Advice by a pattern of PyTorch's error message."""


def machine_failure(error: BaseException) -> str | None:
    """Return one line about a full memory or a failed GPU; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    if isinstance(error, torch.OutOfMemoryError) or re.search("CUDA error: out of|_STATUS_ALLOC_FAILED", text):
        return (
            "not enough memory on the GPU; use fewer clients_per_round, a smaller batch_size, fewer epochs, a "
            "memory_budget or engine = 'eager'"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        words = " ".join(text.split()) or "none is left"
        return f"not enough memory: {words}; use fewer epochs, smaller data or engine = 'eager'"
    if found := re.search(r"(?:CUDA|HIP) error: *([^\n]*)", text):
        # The other lines of PyTorch's message are advice for authors of kernels.
        reason = found[1].rstrip(". ")
        hint = next((hint for words, hint in GPU_HINTS.items() if re.search(words, reason)), "")
        return f"the GPU failed: {reason}{hint}"
    return None
