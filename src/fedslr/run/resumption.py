"""The settings that may change when a run is resumed."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from typing import Any

from fedslr.algorithms import naming
from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.toml import flatten
from fedslr.run.recipe_text import GROUPED

RESUMABLE = {"rounds", "device", "store", "memory_budget", "evaluate_every", "checkpoint_every", "checkpoint_minutes"}
"""What may differ between a run and its resumption: nothing that changes a round already made."""


def fixed_on_resume(algorithm: Algorithm[Any, Any]) -> list[str]:
    """Return the settings that may not change when a run of this method is resumed."""
    return ["rounds"] if algorithm.planned else []


def difference(old: str, new: str, called: str, fixed: Collection[str] = ()) -> str | None:
    """The first key that forbids going on from one dumped recipe to another, with both values; None if none does.

    `called` is what the method is called now.
    """
    before, after = (flatten(tomllib.loads(text)) for text in (old, new))
    allowed = {dotted(k) for k in RESUMABLE} - set(fixed)
    for key in sorted(before.keys() | after.keys(), key=lambda key: (key != "algorithm.name", key)):
        if key == "algorithm.name" and naming.are_same(str(before.get(key)), str(after.get(key)), called):
            continue
        if key not in allowed and before.get(key) != after.get(key):
            why = f"; rounds of {called} depend on it from the first on" if key in map(dotted, fixed) else ""
            return f"{key} was {schema.show(before.get(key))}, now {schema.show(after.get(key))}{why}"
    return None


def dotted(setting: str) -> str:
    """A setting as recipes write it."""
    return ".".join(GROUPED.get(setting, (setting,)))
