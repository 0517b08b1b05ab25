"""Random streams: each is a function of the seed, of its purpose and of a key such as the round and the client."""

from __future__ import annotations

import numpy as np

SPLIT, COHORT, SHUFFLE, NOISE, EVALUATED = range(5)
"""The purposes of streams: splitting data, drawing cohorts, shuffling a client's batches, dropout, drawing the clients
that are evaluated."""


def _sequence(purpose: int, seed: int, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(purpose, *key))


def generator(purpose: int, seed: int, *key: int) -> np.random.Generator:
    """Return a generator for one purpose; the key may be a round, a client, a phase."""
    return np.random.default_rng(_sequence(purpose, seed, key))


def integer(purpose: int, seed: int, *key: int) -> int:
    """Return a seed for another library's generator."""
    return int(_sequence(purpose, seed, key).generate_state(1, np.uint64)[0]) >> 1
