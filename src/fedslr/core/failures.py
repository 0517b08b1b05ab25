"""One plain line for a failure of the machine, such as a full GPU memory."""

from __future__ import annotations

import re

import torch

GPU_HINTS = {
    "assert": "; most likely an index is out of range, and device = 'cpu' shows where",
    "illegal|launch failure|misaligned|ECC": "; a process that was killed while it shared the GPU can be the cause; "
    "continue the run with --resume",
}
"""Advice by the words of PyTorch's error message."""


def machine_failure(error: BaseException) -> str | None:
    """Return a line for a full memory or a failed GPU; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    if isinstance(error, torch.OutOfMemoryError) or re.search("CUDA error: out of|_STATUS_ALLOC_FAILED", text):
        return (
            "not enough memory on the GPU; fewer clients_per_round, a smaller batch_size, fewer epochs, a "
            "memory_budget or engine = 'eager' need less"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        words = " ".join(text.split()) or "none is left"
        return f"not enough memory: {words}; fewer epochs, smaller data or engine = 'eager' need less"
    if found := re.search(r"(?:CUDA|HIP) error: *([^\n]*)", text):
        # The following lines of PyTorch's message advise people who write kernels.
        reason = found[1].rstrip(". ")
        hint = next((hint for words, hint in GPU_HINTS.items() if re.search(words, reason)), "")
        return f"the GPU gave up: {reason}{hint}"
    return None
