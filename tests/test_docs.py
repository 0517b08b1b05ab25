"""Documentation: its Python runs, its commands exist, and its tutorials finish."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt
import mypy.api
import pytest
import torch
import typer.main

import fedslr
import test_every_algorithm as contract
from conftest import make_federation, mlp
from fedslr.cli.main import app
from fedslr.core import schema
from fedslr.run import recipes

ROOT = Path(__file__).parent.parent
METHOD_PAGE = "docs/guide/add-a-method.md"
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
ANNOUNCED = {"demo", "recipes", "doctor"}
"""Commands that the pages may name before they exist."""


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text(page), re.DOTALL)


def run_blocks(page: str) -> dict[str, Any]:
    """Run the Python of a page from top to bottom, and return its names."""
    scope: dict[str, Any] = {"__name__": "page"}
    for block in python_blocks(page):
        exec(compile(block, page, "exec", dont_inherit=True), scope)
    return scope


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = run_blocks(page).get("result")
    if result is not None:
        accuracy = result.summary["accuracy"]
        assert accuracy["personal"] > 0.8
        assert (str(accuracy) in capsys.readouterr().out) == ('print(result.summary["accuracy"])' in text(page))


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("Agg")
    runpy.run_path(str(script))
    plt.close("all")


def command_lines(page: str) -> list[list[str]]:
    """Return the words of every fedslr command on a page, in shell blocks and in running text."""
    blocks = re.findall(r"```sh\n(.*?)```", text(page), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(fedslr [^`\n]+)`", text(page))
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("fedslr") + 1 :] for line in words if "fedslr" in line[:1] or line[:1] == ["torchrun"]]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_of_a_page_exist(page):
    for words in command_lines(page):
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        if isinstance(command, click.Group):
            # A group may be named without one of its commands.
            assert not words or words[0] in ANNOUNCED or words[0].startswith(("-", "…")), f"fedslr {' '.join(words)}"
        else:
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            assert {word for word in words if word.startswith("--")} <= {*known, "--help"}, (command.name, words)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    for name in re.findall(r"(?<![\w/])((?:recipes|results|benchmarks)/[\w./-]+\.(?:toml|py|md))", text(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_pictures_of_a_page_exist(page):
    pictures = re.findall(r'<img src="([^"]+)"', text(page))
    for target in [*pictures, *re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text(page))]:
        assert (ROOT / target).exists(), target


METHOD_HEADINGS = ["Equations", "What travels", "Hyperparameters", "Use", "Results", "Reference"]


def sections(page: str) -> dict[str, str]:
    """Return the text below every heading of a page, from its title on."""
    prose = re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)
    _, *parts = re.split(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def listed_options(section: str) -> list[tuple[str, str]]:
    """Return the names and defaults of the tables in a section; names stand in the first column, in backticks."""
    return re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)


def options_of(cls: type) -> list[tuple[str, str]]:
    """Return the names and defaults of a dataclass's fields, as a page has to show them."""
    defaults = {option.name: option.default for option in schema.describe(cls)}
    return [(k, f"{v:g}" if isinstance(v, (int, float)) else str(v)) for k, v in defaults.items()]


def test_every_method_has_a_page():
    pages = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == {"index", *fedslr.ALGORITHMS}


@pytest.mark.parametrize("name", fedslr.ALGORITHMS)
def test_the_page_of_a_method_follows_the_pattern(name):
    title, *headings = sections(f"docs/methods/{name}.md")
    assert title.endswith(f" (`{name}`)")
    assert headings == METHOD_HEADINGS


@pytest.mark.parametrize("name", fedslr.ALGORITHMS)
def test_the_page_of_a_method_has_its_hyperparameters(name):
    """All of the method's own, in order and with their defaults; settings of the run may follow."""
    listed = listed_options(sections(f"docs/methods/{name}.md")["Hyperparameters"])
    own = options_of(fedslr.ALGORITHMS[name])
    assert listed[: len(own)] == own
    assert set(listed[len(own) :]) <= set(options_of(fedslr.Settings))


@pytest.mark.parametrize("name", fedslr.ALGORITHMS)
def test_the_page_of_a_method_has_the_papers_results(name):
    """The table is generated for the methods of the paper's Table 1, and for no others."""
    marker = f"\n% generated: method_results {name}\n"
    reported = f"| {name} | " in text("results/README.md")
    assert (marker in sections(f"docs/methods/{name}.md")["Results"]) == reported


def test_the_readme_example_is_about_ten_lines():
    lines = [line for line in python_blocks("README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_contributed_method_is_typed_as_we_type(tmp_path):
    block = python_blocks(METHOD_PAGE)[0]
    (tmp_path / "fedavgm.py").write_text(block)
    # The cache of `make lint`: without it the type checker reads all of torch.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, failed, code = mypy.api.run([*options, str(tmp_path / "fedavgm.py")])
    assert code == 0, said + failed


def test_the_contributed_method_works(monkeypatch, tmp_path):
    """Follow the page: write the file, register the method, run it by name and resume it."""
    block = python_blocks(METHOD_PAGE)[0]
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
    block = python_blocks(METHOD_PAGE)[0]
    (tmp_path / "fedavgm.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fedavgm", raising=False)
    small = ("--set", "rounds=1", "--set", "clients_per_round=2")
    (words,) = [words for words in command_lines(METHOD_PAGE) if words[0] == "compare"]
    words[1] = str(ROOT / words[1])
    assert command(*words, "--out", "runs", "--seeds", "0", *small)[0] == 0
    assert json.loads(Path("runs/fedavgm-seed0/summary.json").read_text())["algorithm"] == "fedavgm"
