"""A figure that notebooks show."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure that a notebook shows whether or not matplotlib's pyplot, which would have to register it, is used."""

    def _repr_png_(self) -> bytes:
        made = io.BytesIO()
        self.savefig(made, format="png", dpi=100)
        return made.getvalue()
