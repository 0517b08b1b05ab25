"""PyTorch's random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's generators within the block and restore their state afterwards."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed would seed every device there is, and remember a stack trace where there is none.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield


def leave_capture(device: torch.device | str) -> None:
    """Make the generator of a GPU usable again after the capture of a CUDA graph has failed.

    PyTorch still marks the state of the generator as captured and refuses to draw. A copy of the state is not marked.
    """
    torch.cuda.synchronize(device)
    index = torch.device(device).index
    generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    generator.graphsafe_set_state(generator.clone_state())
