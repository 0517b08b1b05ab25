"""Recipes and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedslr.core.errors import FedslrError
from fedslr.run import experiments, recipes

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "results" / "paper.md").read_text()
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_recipe_makes_its_experiment(path, tmp_path):
    """Every run it asks for is valid, and the command in its own comment is the one that makes it."""
    recipe = recipes.read(path)
    command = re.search(r"^# .*fedslr (compare|sweep) (\S+)", path.read_text(), re.MULTILINE)
    assert command is not None
    assert command[2] == str(path.relative_to(ROOT))
    if command[1] == "sweep":
        jobs = experiments.sweep(recipe, recipe.sweep, recipe.compare.seeds or [0], tmp_path)
    else:
        jobs = experiments.comparison(recipe, recipe.compare.methods, recipe.compare.seeds or [0], tmp_path)
    assert len(jobs) >= 3


def test_the_page_names_every_recipe_and_nothing_else():
    named = set(re.findall(r"recipes/[\w/-]+\.toml", PAGE))
    there = {str(p.relative_to(ROOT)) for p in RECIPES}
    assert named == there - {"recipes/demo/compare.toml"}


def test_paper_recipes_have_the_papers_values():
    for path in (ROOT / "recipes" / "paper").glob("*.toml"):
        recipe = recipes.read(path)
        s, d = recipe.settings, recipe.data
        assert (s.rounds, s.clients_per_round, s.batch_size, s.epochs, s.personal_epochs) == (1000, 10, 20, 2, 1)
        assert (s.lr, s.lr_decay, s.weight_decay) == (0.1, 0.998, 1e-3)
        assert (d.clients, d.alpha, recipe.model.name) == (100, 0.1, "resnet18")
        assert d.split == ("iid" if path.stem.endswith("-iid") else "authors")


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*/config.toml")), ids=lambda p: p.parent.name)
def test_configs_of_earlier_versions_still_run(path):
    assert recipes.read(path).settings.rounds >= 200


def test_compiled_training_is_refused_with_advice(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text("compile = true\n")
    with pytest.raises(FedslrError, match="compile: compiled training on the CPU was removed; delete this line"):
        recipes.read(path)
