"""Measure size on disk and milliseconds per batch of exported ResNet18s with the paper's ranks, beside dense ones.

    python benchmarks/shipping.py --out runs/shipping --json results/benchmarks/shipping.json
    fedslr latency runs/shipping --out results/benchmarks/latency.json

The benchmark makes a run folder for every rank penalty of the paper's latency table (appendix B). One round of FedSLR
leaves in each layer the requested number of singular values. The ranks are those of our trained model
(results/cifar10-dirichlet0.1/fedslr), scaled to the number of parameters in the paper's table; one entry in twenty of
the personal part is not zero. `trained` has the trained model's own ranks. The data are noise, so accuracies mean
nothing here; sizes and times do not depend on weights. The first command also exports some models in every format and
measures the files. The second command measures all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import fedslr
import report
from fedslr.algorithms.fedslr import Client
from fedslr.core.matrix import LowRank, matrix_shape, to_matrix
from fedslr.core.prox import soft_threshold
from fedslr.export.model_export import SUFFIXES
from fedslr.export.programs import session as onnx_session
from fedslr.export.runtimes import OnnxRuntime, Torch, milliseconds
from fedslr.models.networks import ResNet18

TRAINED = Path(__file__).parent.parent / "results" / "cifar10-dirichlet0.1" / "fedslr" / "summary.json"
PAPER = {0.0: 11.17, 1e-5: 7.33, 5e-5: 6.56, 1e-4: 5.54, 5e-4: 3.09, 1e-3: 1.27}
"""The paper's latency table: millions of parameters, by rank penalty."""
EXPORTED = {"trained": "trained", "1e-4": "0.0001", "1e-3": "0.001"}
DENSITY = 0.05
BATCH, CLASSES = 20, 10


@contextmanager
def leaving(ranks: dict[str, int]) -> Iterator[None]:
    """Make FedSLR's thresholds leave the given ranks and one entry in twenty of the personal part.

    The run folder is one of FedSLR, which every command opens.
    """
    trained = fedslr.FedSLR.personalize

    def prox_global(self: Any, z: dict[str, Tensor], last: object = None) -> dict[str, Tensor | LowRank]:
        return {k: truncated(x, ranks[k]) if k in ranks else x for k, x in z.items()}

    def personalize(*given: Any) -> Client:
        p = trained(*given).p
        return Client({k: soft_threshold(x, float(x.abs().flatten().quantile(1 - DENSITY))) for k, x in p.items()})

    with patch.multiple(fedslr.FedSLR, prox_global=prox_global, personalize=personalize):
        yield


def truncated(x: Tensor, rank: int) -> Tensor | LowRank:
    """Threshold singular values to the given rank; return the tensor itself where factors would not be smaller."""
    if rank * sum(matrix_shape(tuple(x.shape))) >= x.numel():
        return x
    u, s, vh = torch.linalg.svd(to_matrix(x), full_matrices=False)
    values = s[:rank] - (s[rank] if rank < len(s) else 0)
    return LowRank((u[:, :rank] * values).contiguous(), vh[:rank].mT.contiguous(), tuple(x.shape))


def shapes() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {k: tuple(p.shape) for k, p in ResNet18((3, 32, 32), CLASSES).named_parameters()}


def parameters(ranks: dict[str, int]) -> int:
    def numbers(name: str, shape: tuple[int, ...]) -> int:
        dense = int(np.prod(shape))
        return min(dense, ranks[name] * sum(matrix_shape(shape))) if name in ranks else dense

    return sum(numbers(name, shape) for name, shape in shapes().items())


def scaled(trained: dict[str, int], millions: float) -> dict[str, int]:
    """Scale the trained ranks so that the model has the given number of parameters."""
    low, high = 0.0, 200.0
    for _ in range(60):
        factor = (low + high) / 2
        ranks = {k: max(1, round(factor * r)) for k, r in trained.items()}
        low, high = (factor, high) if parameters(ranks) < 1e6 * millions else (low, factor)
    return ranks


def make(home: Path, name: str, penalty: float, ranks: dict[str, int]) -> Path:
    """Make the run folder of a model with these ranks."""
    folder, data = home / name, home / "data" / "noise.npz"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        arrays = {part: rng.integers(0, 256, (BATCH, 3, 32, 32), dtype=np.uint8) for part in ("x", "x_test")}
        labels = {part: np.arange(BATCH) % CLASSES for part in ("y", "y_test")}
        owners = {part: np.zeros(BATCH, dtype=np.int64) for part in ("client", "client_test")}
        np.savez(data, **arrays, **labels, **owners)
    if not folder.exists():
        federation = fedslr.load(f"npz:{data}", clients=1)
        with leaving(ranks):
            method = fedslr.FedSLR(rank_penalty=penalty)
            fedslr.run(method, federation, "resnet18", rounds=1, device="cpu", out=folder)
    return folder


def runs(path: Path, format: str, dense: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the exported and the dense model, each loaded by the runtime for its format."""
    if format == "onnx":
        session = onnx_session(path.read_bytes())
        given = {session.get_inputs()[0].name: x.numpy()}
        return {"file": lambda: session.run(None, given), "dense": OnnxRuntime().ready(dense, x)}
    read = fedslr.load_exported if format == "safetensors" else lambda file: torch.export.load(file).module()
    return {"file": Torch().ready(read(path), x), "dense": Torch().ready(dense, x)}


def exports(folder: Path, label: str, formats: list[str], repeat: int) -> list[dict[str, Any]]:
    """Export both models of a run in every format, once for size and once for speed."""
    result = fedslr.open_run(folder, device="cpu")
    x = result.federation.inputs(result.federation.clients[0].x_test[:BATCH])
    rows = []
    for client in (None, 0):
        dense = result.global_model() if client is None else result.personal_model(client)
        for format in formats:
            for purpose in ("size", "speed"):
                name = f"{'global' if client is None else client}-{purpose}{SUFFIXES[format]}"
                made = fedslr.export(
                    result, unused(folder / "export" / name), client=client, format=format, purpose=purpose
                )
                took = milliseconds(runs(made.path, format, dense, x), repeat)
                facts = made.facts
                rows.append(
                    {
                        "ranks": label,
                        "model": "global" if client is None else "personal",
                        "format": format,
                        "for": purpose,
                        "MB": facts.bytes / 1e6,
                        "of dense": facts.bytes / facts.dense_bytes,
                        "ms": took["file"],
                        "dense ms": took["dense"],
                        "ratio": took["file"] / took["dense"],
                        "not dense": len(facts.about["forms"]),
                        "difference": facts.difference,
                    }
                )
                report.show(rows[-1:])
    return rows


def unused(path: Path) -> Path:
    """Overwrite the file of an earlier call."""
    for old in (path, path.with_name(path.name + ".md")):
        old.unlink(missing_ok=True)
    return path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("runs/shipping"))
    options.add_argument("--ranks", nargs="+", default=list(EXPORTED), choices=list(EXPORTED))
    options.add_argument("--formats", nargs="+", default=list(SUFFIXES), choices=list(SUFFIXES))
    options.add_argument("--repeat", type=int, default=30)
    options.add_argument("--json", help="also write the figures to this file")
    given = options.parse_args()
    trained = json.loads(TRAINED.read_text())["rank"]
    folders = {str(k): make(given.out, str(k), k, scaled(trained, m) if k else {}) for k, m in PAPER.items()}
    folders["trained"] = make(given.out / "trained", "trained", 1e-4, trained)
    rows: list[dict[str, Any]] = []
    for label in given.ranks:
        rows += exports(folders[EXPORTED[label]], label, given.formats, given.repeat)
    report.finish("shipping", rows, given.json)


if __name__ == "__main__":
    report.call(main)
