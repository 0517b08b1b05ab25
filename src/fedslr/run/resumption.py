"""The settings that may change when a run is resumed."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from typing import Any

from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.schema import flatten
from fedslr.run.recipe_text import dotted

RESUMABLE = {"rounds", "device", "store", "memory_budget", "evaluate_every", "checkpoint_every", "checkpoint_minutes"}
"""The settings that change no round that was already made."""


def fixed_on_resume(algorithm: Algorithm[Any, Any, Any]) -> list[str]:
    """Return the settings that may not change when a run of this method is resumed."""
    return ["rounds"] if algorithm.planned else []


def difference(old: str, new: str, method: str, fixed: Collection[str] = ()) -> str | None:
    """Return the first key in which two recipes may not differ if one resumes the other, with both values, or None."""
    before, after = (flatten(tomllib.loads(text)) for text in (old, new))
    allowed = {dotted(k) for k in RESUMABLE} - set(fixed)
    for key in sorted(before.keys() | after.keys(), key=lambda key: (key != "algorithm.name", key)):
        if key not in allowed and before.get(key) != after.get(key):
            why = f"; rounds of {method} depend on it from the first on" if key in map(dotted, fixed) else ""
            return f"{key} was {schema.show(before.get(key))}, now {schema.show(after.get(key))}{why}"
    return None
