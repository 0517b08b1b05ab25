"""Who takes part in a round."""

from __future__ import annotations

import numpy as np

COHORTS = 1
"""Keeps the stream of cohorts apart from every other stream of the same seed."""


def uniform(num_clients: int, size: int, seed: int, round: int) -> list[int]:
    """`size` clients drawn uniformly without replacement; a function of seed and round alone."""
    rng = np.random.default_rng([seed, COHORTS, round])
    return sorted(int(c) for c in rng.choice(num_clients, size, replace=False))
