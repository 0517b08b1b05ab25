"""What the machine lends this process."""

from __future__ import annotations

import os

import torch


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_capture(device: torch.device | str) -> None:
    """Let random numbers be drawn on a GPU again after a capture of its launches has failed.

    PyTorch's generator is then still marked as captured, and refuses; a copy of its state is not.
    """
    torch.cuda.synchronize(device)
    index = torch.device(device).index
    generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    generator.graphsafe_set_state(generator.clone_state())
