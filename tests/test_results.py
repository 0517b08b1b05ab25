"""The committed results pages match the run folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_pages(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/against_paper.py"), *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_pages_match_their_runs() -> None:
    done = write_pages(ROOT, "--check")
    assert done.returncode == 0, done.stderr


def test_a_changed_record_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    records = tmp_path / "results/cifar10-dirichlet0.1/fedslr-authors/metrics.jsonl"
    lines = records.read_text().splitlines()
    records.write_text(
        "\n".join([*lines[:-1], lines[-1].replace('"accuracy_global": 0.86', '"accuracy_global": 0.96')])
    )
    done = write_pages(tmp_path, "--check")
    assert done.returncode == 2
    assert "run python benchmarks/against_paper.py" in done.stderr
