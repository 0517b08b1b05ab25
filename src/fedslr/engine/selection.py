"""The choice of the clients that take part in a round."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedslr.core import plugins, seeds
from fedslr.core.errors import FedslrError

Select = Callable[[Any, int, Sequence[int]], Sequence[int]]
"""A function of a random generator, the cohort size and every client's number of examples that returns a cohort."""


def uniform(rng: np.random.Generator, size: int, examples: Sequence[int]) -> Sequence[int]:
    """`size` clients, uniformly without replacement."""
    return [int(c) for c in rng.choice(len(examples), size, replace=False)]


def bernoulli(rng: np.random.Generator, size: int, examples: Sequence[int]) -> Sequence[int]:
    """Draw every client independently, `size` on average; draw again if the cohort is empty."""
    while True:
        came = np.flatnonzero(rng.random(len(examples)) < size / len(examples))
        if len(came):
            return [int(c) for c in came]


def by_size(rng: np.random.Generator, size: int, examples: Sequence[int]) -> Sequence[int]:
    """`size` clients without replacement, those with more examples more often."""
    weights = np.asarray(examples, float)
    return [int(c) for c in rng.choice(len(examples), size, replace=False, p=weights / weights.sum())]


def authors(number: int, size: int, examples: Sequence[int]) -> Sequence[int]:
    """The coins of the paper's authors' published code, which begins anew with every round's number."""
    while True:
        rng = np.random.RandomState(number % 2**32)
        came = np.flatnonzero(rng.uniform(size=len(examples)) <= size / len(examples))
        if len(came):
            return [int(c) for c in came]
        number += 1


SELECTIONS: dict[str, Select] = {"uniform": uniform, "bernoulli": bernoulli, "by-size": by_size, "authors": authors}


def find(name: str) -> Select:
    """The selection of a name: one of the table, or `module:function` of a person's own."""
    return SELECTIONS.get(name) or plugins.function("selection", name, "rng", "size", "examples")


def draw(select: Select, size: int, examples: Sequence[int], seed: int, round: int) -> list[int]:
    """The cohort of a round: a function of seed and round alone."""
    drawn_by: Any = seed + round if select is authors else seeds.generator(seeds.COHORT, seed, round)
    try:
        found = list(select(drawn_by, size, list(examples)))
        chosen = [_number(client) for client in found]
    except FedslrError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise FedslrError(
            f"selection: expected a function (rng, size, examples) that returns clients; {why}"
        ) from error
    known = range(len(examples))
    if not chosen or any(c not in known for c in chosen) or len(set(chosen)) < len(chosen):
        raise FedslrError(
            f"selection: round {round + 1} got {chosen}, expected some of the clients 0 to {len(known) - 1}, none twice"
        )
    return sorted(chosen)


def _number(client: Any) -> int:
    if isinstance(client, bool | np.bool_):
        raise TypeError("true and false are no numbers of clients")
    return int(client) if isinstance(client, float) and client.is_integer() else operator.index(client)


def evaluated(size: int | None, num_clients: int, seed: int) -> Sequence[int]:
    """The clients that are evaluated: all, or so many of them, the same ones whenever that is done."""
    if size is None or size >= num_clients:
        return range(num_clients)
    return sorted(uniform(seeds.generator(seeds.EVALUATED, seed), size, range(num_clients)))
