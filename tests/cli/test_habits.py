"""Habits of the command line: recipes by name, short help, JSON for scripts, and advice on slips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.main

import fedslr
from fedslr.cli import doctor, main
from fedslr.run import recipe_library, recipes

SHIPPED = Path(fedslr.__path__[0]) / "run" / "library"


def test_a_recipe_is_found_by_its_name_or_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe_library.find_recipe("demo") == recipe_library.find_recipe("demo/compare")
    assert recipe_library.find_recipe("paper/cifar10-dirichlet") == SHIPPED / "paper" / "cifar10-dirichlet.toml"
    assert recipe_library.find_recipe("demo.toml") == Path("demo.toml")
    (tmp_path / "demo").mkdir()
    assert recipe_library.find_recipe("demo").name == "compare.toml"
    (tmp_path / "demo" / "mine").write_text("rounds = 1")
    assert recipe_library.find_recipe("demo/mine") == Path("demo/mine")


def test_every_command_takes_a_recipe_by_its_name(command, tmp_path):
    one = ("--set", "rounds=1", "--set", "data.clients=5", "--out", tmp_path)
    assert command("run", "demo", *one[:-1], tmp_path / "a")[0] == 0
    alone = ("--methods", "local", "--seeds", "0", "--jobs", 1)
    assert command("compare", "demo", *one[:-1], tmp_path / "b", *alone)[0] == 0
    assert command("sweep", "demo", *one[:-1], tmp_path / "c", "--over", "lr=0.1", "--jobs", 1)[0] == 0
    code, printed, _ = command("recipe", "demo")
    assert (code, printed) == (0, (SHIPPED / "demo" / "compare.toml").read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "near"), [("cifar10", "paper/cifar10-dirichlet or paper/cifar10-iid"), ("dmeo", "demo")]
)
def test_an_unknown_recipe_is_answered_with_near_names(name, near, command):
    code, _, err = command("run", name)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"recipe: got '{name}', neither a file nor a recipe of fedslr; did you mean {near}" in err


def test_recipes_are_listed_with_their_command(command):
    code, printed, _ = command("recipes")
    assert code == 0
    assert "fedslr sweep" in next(line for line in printed.splitlines() if line.startswith("demo/sensitivity-eta"))
    listed = json.loads(command("recipes", "--json")[1])
    assert [one["name"] for one in listed] == list(recipe_library.shipped())
    assert all(one["about"].endswith(".") for one in listed)


def test_a_second_demo_shows_the_first(command, tmp_path, monkeypatch):
    short = recipes.read(recipe_library.find_recipe("demo"), ["rounds=1", 'compare.methods=["local"]'])
    monkeypatch.setattr(recipes, "read", lambda *given: short)
    usual = ("demo", "--out", tmp_path, "--jobs", 1)
    assert command(*usual)[0] == 0
    summary = next(tmp_path.glob("*/summary.json"))
    before = summary.stat().st_mtime_ns
    code, printed, _ = command(*usual)
    assert (code, summary.stat().st_mtime_ns) == (0, before)
    assert "local" in printed
    assert command(*usual, "--fresh")[0] == 0
    assert summary.stat().st_mtime_ns != before


@pytest.mark.parametrize("group", ["", "data", "federation"])
def test_summaries_fit_eighty_columns(group, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, printed, _ = command(*group.split(), "-h")
    assert code == 0
    listed = printed.partition("Commands:\n")[2].splitlines()
    parser = typer.main.get_command(main.app)
    assert len(listed) == len((parser.commands[group] if group else parser).commands)
    assert not any(line.endswith("...") for line in listed)


def test_data_for_scripts(command, tmp_path):
    assert command("run", "demo", "--set", "rounds=1", "--set", "data.clients=5", "--out", tmp_path / "a")[0] == 0
    (shown,) = json.loads(command("show", tmp_path, "--json")[1])
    assert (shown["folder"], shown["finished"], shown["algorithm"]) == (str(tmp_path / "a"), True, "fedslr")
    methods = json.loads(command("algorithms", "--json")[1])
    assert methods["feddyn"][0]["name"] == "alpha"
    datasets = json.loads(command("data", "list", "--json", "--root", tmp_path)[1])
    states = {one["name"]: one["state"] for one in datasets}
    assert (states["cifar10"], states["diabetes"]) == ("to be fetched", "built in")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--rounds", "5"), "error: No such option: --rounds (rounds is a key of the recipe: --set rounds=5)"),
        (("--lr=0.05",), "(lr is a key of the recipe: --set lr=0.05)"),
        (("--method", "ditto"), "(algorithm.name is a key of the recipe: --set algorithm.name=ditto)"),
        (("--clients-per-round", "3"), "--set clients_per_round=3"),
        (("--fast",), "(see fedslr run --help)"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_change(given, says, command):
    code, _, err = command("run", "demo", *given)
    assert (code, len(err.splitlines())) == (2, 1)
    assert says in err


def test_the_doctor_finds_this_machine_well(command, tmp_path):
    code, printed, _ = command("doctor", "--out", tmp_path / "runs", "--root", tmp_path, "--json")
    found = json.loads(printed)
    assert (code, found["versions"]["fedslr"]) == (0, fedslr.__version__)
    assert all(test["error"] is None for test in found["tests"].values())


def test_the_doctor_names_what_is_wrong(command, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_train", lambda *given, **options: 1 / 0)
    (tmp_path / "file").touch()
    code, printed, err = command("doctor", "--out", tmp_path / "file")
    assert code == 2
    assert "ZeroDivisionError" in printed
    assert f"error: doctor: {tmp_path / 'file'} cannot be written; choose another" in err
