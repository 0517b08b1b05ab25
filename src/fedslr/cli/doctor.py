"""`fedslr doctor`: check this installation and this machine."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from fedslr.algorithms import FedSLR
from fedslr.cli.arguments import AsJson
from fedslr.cli.printing import print_json
from fedslr.core.errors import FedslrError
from fedslr.core.machine import cores
from fedslr.core.version import __version__
from fedslr.data import load
from fedslr.run.api import run

EXTRAS = {
    "deploy": ("flwr",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "table": ("pandas", "pyarrow"),
    "track": ("tensorboard", "mlflow", "wandb"),
}
"""The packages of every extra: pip install 'fedslr[deploy]'."""


def doctor(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for runs, which must be writable.")] = Path(
        "runs"
    ),
    root: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the datasets.")] = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Check this installation and this machine.

    The self-test trains a tiny federation for some seconds. The exit code is 2 if something is wrong.
    """
    tests = {
        "resumed run equals one that was never stopped": _resumed_equals_whole,
        "batched engine equals the eager one": _batched_equals_eager,
    }
    found: dict[str, Any] = {
        "versions": {"fedslr": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "machine": {
            "system": platform.platform(),
            "cores": cores(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "extras": {name: {package: _version(package) for package in packages} for name, packages in EXTRAS.items()},
        "writable": {str(folder): _is_writable(folder) for folder in (out, root)},
        "tests": {name: _outcome(test) for name, test in tests.items()},
    }
    if as_json:
        print_json(found)
    else:
        _print(found)
    wrong = [f"{folder} cannot be written; choose another" for folder, good in found["writable"].items() if not good]
    wrong += [
        f"the test that a {name} failed: {test['error']}" for name, test in found["tests"].items() if test["error"]
    ]
    if wrong:
        raise FedslrError(f"doctor: {'; '.join(wrong)}")


def _print(found: dict[str, Any]) -> None:
    machine = found["machine"]
    typer.echo(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    typer.echo(f"{machine['system']}, {machine['cores']} cores, GPU: {', '.join(machine['gpus']) or 'none'}")
    for name, packages in found["extras"].items():
        missing = [package for package, version in packages.items() if version is None]
        hint = f"lacks {', '.join(missing)} (pip install 'fedslr[{name}]')" if missing else "installed"
        typer.echo(f"extra {name}: {hint}")
    for folder, good in found["writable"].items():
        typer.echo(f"folder {folder}: {'writable' if good else 'NOT writable'}")
    for name, test in found["tests"].items():
        typer.echo(f"{name}: {test['error'] or 'yes'} ({test['seconds']:.1f} s)")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_writable(folder: Path) -> bool:
    """Return whether a folder can be written, or made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _outcome(test: Callable[[], None]) -> dict[str, Any]:
    """Return the seconds and the error of a test, whatever the error is."""
    begun, error = perf_counter(), None
    try:
        test()
    except Exception as failure:
        error = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    return {"error": error, "seconds": round(perf_counter() - begun, 2)}


def _train(rounds: int = 4, **options: Any) -> dict[str, Any]:
    federation = load("digits", clients=4, samples_per_client=20)
    settings = {"clients_per_round": 2, "dtype": "float64", "device": "cpu", "engine": "eager", **options}
    return dict(
        run(FedSLR(eta_g=5), federation, "mlp", rounds=rounds, warn=lambda text: None, **settings).global_params
    )


def _resumed_equals_whole() -> None:
    with tempfile.TemporaryDirectory(prefix="fedslr-doctor-") as folder:
        _train(2, out=Path(folder) / "run")
        _require_close(_train(out=Path(folder) / "run", resume=True), _train(), 0.0)


def _batched_equals_eager() -> None:
    _require_close(_train(engine="batched"), _train(), 1e-9)


def _require_close(a: dict[str, Any], b: dict[str, Any], most: float) -> None:
    difference = max((a[name] - b[name]).abs().max().item() for name in a)
    if difference > most:
        raise ArithmeticError(f"the global models differ by {difference:.1e}, expected at most {most:g}")
