"""Random streams: each is a function of the seed and of what it is for, and no two are the same."""

from __future__ import annotations

import numpy as np

SPLIT, COHORT, SHUFFLE, NOISE, EVALUATED, AGGREGATE = range(6)
"""What a stream is for: sharing out data, drawing cohorts, shuffling a client's batches, dropout and its like,
drawing the clients that are evaluated, noise that a server adds."""


def _sequence(purpose: int, seed: int, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(purpose, *key))


def generator(purpose: int, seed: int, *key: int) -> np.random.Generator:
    """A generator for one purpose; the key may be a round, a client, a phase."""
    return np.random.default_rng(_sequence(purpose, seed, key))


def integer(purpose: int, seed: int, *key: int) -> int:
    """A seed for another library's generator."""
    return int(_sequence(purpose, seed, key).generate_state(1, np.uint64)[0]) >> 1
