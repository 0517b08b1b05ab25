"""How labels are spread over the clients of a federation."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from fedslr.data.federation import Federation
from fedslr.report import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COUNTED = 1000
"""Clients whose labels a run folder tells."""


def label_counts(federation: Federation, most: int | None = None) -> np.ndarray[Any, Any]:
    """Training samples by client and label, of all clients or of the first so many."""
    clients = itertools.islice(federation.clients, most)
    return np.stack([np.bincount(c.y.cpu().numpy(), minlength=federation.num_classes) for c in clients])


def skew(counts: np.ndarray[Any, Any]) -> dict[str, float]:
    """Three figures of skew: a client's largest share of one label, labels it holds, distance to the pooled ratio."""
    shares = counts / counts.sum(1, keepdims=True)
    pooled = counts.sum(0) / counts.sum()
    return {
        "largest_share": float(shares.max(1).mean()),
        "labels_held": float((counts > 0).sum(1).mean()),
        "distance": float(0.5 * np.abs(shares - pooled).sum(1).mean()),
    }


def extremes(counts: np.ndarray[Any, Any]) -> str:
    """Which labels are rarest and most frequent over all clients: classes are not equally hard to tell."""
    pooled = counts.sum(0) / counts.sum()
    low, high = int(pooled.argmin()), int(pooled.argmax())
    if low == high:
        return f"every label has {percent(pooled[low])} of all samples"
    return f"label {low} has {percent(pooled[low])} of all samples, label {high} has {percent(pooled[high])}"


def split_figure(federation: Federation) -> Figure:
    """Stacked bars: one for every client, one colour for every label."""
    counts = label_counts(federation)
    clients, labels = counts.shape
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(14, max(6, 0.16 * clients + 2)), 4), layout="constrained")
    axes = figure.subplots()
    palette = colormaps["tab10" if labels <= 10 else "nipy_spectral"]
    bottom = np.zeros(clients)
    for label in range(labels):
        colour = palette(label if labels <= 10 else label / labels)
        axes.bar(range(clients), counts[:, label], 0.9, bottom, color=colour, label=str(label), linewidth=0)
        bottom += counts[:, label]
    axes.set(xlabel="client", ylabel="training samples", xlim=(-0.6, clients - 0.4))
    axes.spines[["top", "right"]].set_visible(False)
    if labels <= 20:
        axes.legend(title="label", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return figure
