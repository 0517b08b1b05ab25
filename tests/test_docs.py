"""What the documents show is what happens: their Python is run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import mypy.api
import pytest
import torch

import fedslr
import test_every_algorithm as contract
from conftest import make_federation, mlp
from fedslr.run import recipes

ROOT = Path(__file__).parent.parent


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(python_blocks("README.md"))))
def test_readme_examples_run(index, capsys):
    scope: dict[str, Any] = {}
    exec(compile(python_blocks("README.md")[index], f"README.md, example {index + 1}", "exec"), scope)
    assert scope["result"].summary["accuracy"]["personal"] > 0.5


@pytest.mark.parametrize("page", ["docs/own-data.md", "docs/own-model.md", "docs/export.md"])
def test_pages_are_complete_programs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(page)
    scope: dict[str, Any] = {}
    exec(compile(block, page, "exec"), scope)
    found = scope["result"].summary["accuracy"]
    assert found["personal"] > 0.8
    assert str(found) in capsys.readouterr().out


def test_the_readme_example_is_about_ten_lines():
    lines = [line for line in python_blocks("README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_contributed_method_is_typed_as_we_type(tmp_path):
    (block,) = python_blocks("CONTRIBUTING.md")
    (tmp_path / "fedavgm.py").write_text(block)
    # The cache of `make lint`: without it the type checker reads all of torch.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, failed, code = mypy.api.run([*options, str(tmp_path / "fedavgm.py")])
    assert code == 0, said + failed


def test_the_contributed_method_works(monkeypatch, tmp_path):
    """CONTRIBUTING's walk, walked: the file is written, registered, run by name and resumed."""
    (block,) = python_blocks("CONTRIBUTING.md")
    scope: dict[str, Any] = {"__name__": "fedavgm"}
    exec(compile(block, "fedavgm.py", "exec", dont_inherit=True), scope)
    method = scope["FedAvgM"]
    monkeypatch.setitem(fedslr.ALGORITHMS, method.name, method)
    recipe = recipes.parse({"algorithm": {"name": "fedavgm", "beta": 0.5}})
    federation, options = make_federation([5, 8, 6]), {"lr": 0.05, "clients_per_round": 2}
    whole = fedslr.run(recipe.algorithm, federation, mlp(), rounds=4, **options)
    fedslr.run(recipe.algorithm, federation, mlp(), rounds=2, out=tmp_path, **options)
    again = fedslr.run(recipe.algorithm, federation, mlp(), rounds=4, out=tmp_path, resume=True, **options)
    plain = fedslr.run(method(beta=0), federation, mlp(), rounds=4, **options)
    fedavg = fedslr.run(fedslr.FedAvg(), federation, mlp(), rounds=4, **options)
    for law in (
        contract.test_is_a_function_of_its_seed,
        contract.test_what_travels_survives_the_wire,
        contract.test_the_summary_keeps_its_contract,
        contract.test_accuracies_are_those_of_the_models,
    ):
        law(method)
    contract.test_cohorts_of_one_and_of_everyone(method, 1)
    contract.test_resumed_is_never_stopped(method, "disk", tmp_path / "contract")
    for name, x in whole.global_params.items():
        assert torch.equal(x, again.global_params[name])
        assert torch.equal(plain.global_params[name], fedavg.global_params[name])
        assert not torch.equal(x, fedavg.global_params[name])


def test_the_contributed_method_is_found_where_it_was_written(monkeypatch, tmp_path, command):
    (block,) = python_blocks("CONTRIBUTING.md")
    (tmp_path / "fedavgm.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fedavgm", raising=False)
    recipe, small = ROOT / "recipes/demo/compare.toml", ("--set", "rounds=1", "--set", "clients_per_round=2")
    (command_line,) = re.findall(r"`fedslr (compare RECIPE --methods [^`]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    words = [str(recipe) if word == "RECIPE" else word for word in command_line.split()]
    assert command(*words, "--out", "runs", "--seeds", "0", *small)[0] == 0
    assert json.loads(Path("runs/fedavgm-seed0/summary.json").read_text())["algorithm"] == "fedavgm"
