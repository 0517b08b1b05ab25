"""Random numbers: NumPy streams and the state of PyTorch's generators.

A stream is a function of the seed, of its purpose, and of a key such as the round and the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

SPLIT, COHORT, SHUFFLE, NOISE, EVALUATED = range(5)
"""The purposes of streams: partitions of data, cohorts, shuffles of a client's batches, dropout, and the clients that
are evaluated."""


def _sequence(purpose: int, seed: int, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(purpose, *key))


def generator(purpose: int, seed: int, *key: int) -> np.random.Generator:
    """Return a generator for one purpose; the key holds numbers such as the round, the client and the phase."""
    return np.random.default_rng(_sequence(purpose, seed, key))


def integer(purpose: int, seed: int, *key: int) -> int:
    """Return a seed for another library's generator."""
    return int(_sequence(purpose, seed, key).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's generators within the block and restore their state afterwards."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed would seed all devices, and without a GPU it would record a stack trace.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield


def leave_capture(device: torch.device | str) -> None:
    """Make the generator of a GPU usable after a failed capture of a CUDA graph.

    PyTorch still marks the generator's state as captured and refuses to draw. A copy of the state is not marked.
    """
    torch.cuda.synchronize(device)
    index = torch.device(device).index
    generator = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    generator.graphsafe_set_state(generator.clone_state())
