"""Output of the benchmarks: a table on the terminal, and JSON with date, machine and commit."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedslr.core.durable import write_durably
from fedslr.core.errors import FedslrError


def call(main: Callable[[], None]) -> None:
    """Run a benchmark. Print an expected error as one line and exit with 2; exit with 130 after ctrl-C."""
    try:
        main()
    except (FedslrError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise FedslrError("this benchmark needs a CUDA GPU, and PyTorch finds none on this machine")


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table, one line per row."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    heads = list(rows[0])
    widths = [max(len(heads[i]), *(len(line[i]) for line in cells)) for i in range(len(heads))]
    for line in [heads, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def machine() -> dict[str, Any]:
    """Return date, commit, hardware and versions."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": asked.stdout.strip() or None,
        "card": card,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write(name: str, found: dict[str, Any], path: str | None) -> None:
    """Write the figures and the machine as JSON if a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_durably(Path(path), (json.dumps({"benchmark": name, **machine(), **found}, indent=1) + "\n").encode())


def finish(name: str, rows: list[dict[str, Any]], path: str | None) -> None:
    """Print all rows again, and write them as JSON if a path is given."""
    print()
    show(rows)
    write(name, {"rows": rows}, path)
    if path:
        print(f"written to {path}")
