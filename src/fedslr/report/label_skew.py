"""How labels are spread over the clients of a federation."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fedslr.data.federation import Federation
from fedslr.report.number_text import percent
from fedslr.report.saved_runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COUNTED_CLIENTS = 1000
"""A run folder holds the label counts of at most this many clients."""


def label_counts(federation: Federation, most: int | None = None) -> np.ndarray[Any, Any]:
    """Return the training samples by client and label, of all clients or of the first `most`.

    Targets that are not one label per sample count as a single label.
    """
    clients = itertools.islice(federation.clients, most)
    if federation.task not in ("classification", "binary"):
        return np.array([[len(c.y)] for c in clients])
    return np.stack([np.bincount(c.y.cpu().numpy(), minlength=federation.num_classes) for c in clients])


def saved_label_counts(run: Run) -> np.ndarray[Any, Any] | None:
    """Return the label counts in a run's folder; a deployed federation has none."""
    path = run.folder / "labels.json"
    return np.array(json.loads(path.read_text("utf-8"))["counts"]) if path.exists() else None


def skew(counts: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return means over clients: the largest share of one label, the labels held, the distance to the pooled shares."""
    shares = counts / counts.sum(1, keepdims=True)
    pooled = counts.sum(0) / counts.sum()
    return {
        "largest_share": float(shares.max(1).mean()),
        "labels_held": float((counts > 0).sum(1).mean()),
        "distance": float(0.5 * np.abs(shares - pooled).sum(1).mean()),
    }


def extremes(counts: np.ndarray[Any, Any]) -> str:
    """Return a sentence on the rarest and the most frequent label over all clients."""
    pooled = counts.sum(0) / counts.sum()
    low, high = int(pooled.argmin()), int(pooled.argmax())
    if low == high:
        return f"every label has {percent(pooled[low])} of all samples"
    return f"label {low} has {percent(pooled[low])} of all samples, label {high} has {percent(pooled[high])}"


def split_figure(federation: Federation) -> Figure:
    """Return stacked bars: one bar per client, one colour per label."""
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
