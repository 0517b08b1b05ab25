"""The colours of methods, the same in every figure: Okabe & Ito's palette, distinct to the colour-blind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B", "#8F8F2E")
"""Okabe & Ito's colours; grey and olive for their black and yellow, which vanish in the dark and on paper."""
DARK = ("#3B97DB", "#F0733A", "#2DC09A", "#E29AC3", "#F2B632", "#8ED1F8", "#B8B8B8", "#C2C25A")
"""The same on a dark page."""
PREFERRED = ("fedslr", "fedavg", "ditto", "feddyn", "fedrep", "local", "scaffold", "apfl")
"""These methods have the colours of the palette in this order, on every page."""


class Look(NamedTuple):
    """A colour of the palette, and how many methods before have the same one; markers then tell their lines apart."""

    colour: int
    again: int = 0


def looks(names: Sequence[str]) -> list[Look]:
    """Return a look for each of some different names."""
    taken = {name: Look(PREFERRED.index(name)) for name in names if name in PREFERRED}
    all_looks = (Look(n % len(PALETTE), n // len(PALETTE)) for n in itertools.count())
    free = (look for look in all_looks if look not in taken.values())
    return [taken.get(name) or next(free) for name in names]
