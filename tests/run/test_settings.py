from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

import fedslr
from fedslr.core import schema
from fedslr.core.errors import FedslrError
from fedslr.engine import settings
from fedslr.run import recipe_text, recipes

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_is_valid_and_its_dump_is_the_same_recipe(path):
    recipe = recipes.read(path)
    again = recipes.parse(tomllib.loads(recipe.to_toml()))
    extra = {k: getattr(recipe, k) for k in ("methods", "compare", "sweep", "fixed_split")}
    assert dataclasses.replace(again, **extra) == recipe


def test_an_empty_recipe_is_the_papers_defaults():
    recipe = recipes.parse({})
    s = recipe.settings
    assert (s.rounds, s.batch_size, s.epochs, s.personal_epochs) == (1000, 20, 2, 1)
    assert (s.lr, s.lr_decay, s.weight_decay) == (0.1, 0.998, 1e-3)
    assert recipe.data.clients == 100
    assert recipes.parse({"seed": 5}).data.seed == 5
    assert recipes.parse({"seed": 5, "data": {"seed": 2}}).data.seed == 2
    assert s.cohort_size(100) == 10
    assert recipe.algorithm == fedslr.FedSLR(eta_g=10, rank_penalty=1e-4, l1_penalty=1e-3)
    assert fedslr.ALGORITHMS["feddyn"]() == fedslr.FedDyn(alpha=0.1)


def test_changes_are_toml_values_or_plain_words():
    table = recipes.apply(
        {}, ["lr=0.5", "data.name=digits", 'data.split="iid"', "algorithm.name=feddyn", "algorithm.alpha=1"]
    )
    assert table == {"lr": 0.5, "data": {"name": "digits", "split": "iid"}, "algorithm": {"name": "feddyn", "alpha": 1}}


def test_choosing_another_method_drops_the_old_ones_hyperparameters():
    table = {"algorithm": {"name": "fedslr", "eta_g": 3}}
    assert recipes.parse(recipes.apply(table, ["algorithm.name=fedavg"])).algorithm == fedslr.FedAvg()
    table = {"algorithm": {"name": "fedslr", "eta_g": 3}}
    kept = recipes.apply(table, ["algorithm.name=fedslr", "algorithm.l1_penalty=0"])
    assert recipes.parse(kept).algorithm == fedslr.FedSLR(eta_g=3, l1_penalty=0)


def test_hostile_names_survive_a_dump():
    nasty = 'a "quoted" \\ name\nwith <script> and ünicode'
    text = recipe_text.dump(settings.Settings(), fedslr.FedAvg(), {"name": nasty}, {"name": "cnn"})
    assert tomllib.loads(text)["data"]["name"] == nasty


def test_the_cohort_defaults_to_ten_or_all():
    assert settings.Settings().cohort_size(4) == 4
    assert settings.Settings().cohort_size(40) == 10
    with pytest.raises(FedslrError, match="got 5, but there are only 4 clients; expected 1 to 4"):
        settings.Settings(clients_per_round=5).cohort_size(4)


def test_every_option_has_help():
    for cls in (settings.Settings, fedslr.data.DataOptions, recipe_text.ModelOptions, *fedslr.ALGORITHMS.values()):
        for option in schema.describe(cls):
            assert option.help, f"{cls.__name__}.{option.name}"


def test_checked_values_take_the_declared_type():
    assert isinstance(schema.build(settings.Settings, {"lr": 1}).lr, float)
    assert isinstance(fedslr.FedSLR(eta_g=10).eta_g, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fedslr.FedSLR().eta_g = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "size"),
    [("8GB", 8 * 10**9), ("500 mb", 5 * 10**8), ("1.5KB", 1500), (0, 0), (4096, 4096), ("4096", 4096), (None, None)],
)
def test_a_memory_budget_is_a_size(given, size):
    assert schema.build(settings.Settings, {"memory_budget": given}).memory_bytes() == size


@pytest.mark.parametrize("given", [-1, "much", "8XB", "", 1.5, True, 10**25, "9" * 400 + "GB"])
def test_what_is_no_size_is_no_memory_budget(given):
    with pytest.raises(FedslrError, match=r"memory_budget: got .*, expected a whole number or a text such as 500MB or"):
        schema.build(settings.Settings, {"memory_budget": given})


def test_a_store_on_disk_has_no_memory_budget():
    assert settings.Settings(store="disk").memory_bytes() == 0
    with pytest.raises(FedslrError, match="store = 'disk' keeps no states in memory"):
        settings.Settings(store="disk", memory_budget="1GB")


def test_evaluated_clients_are_a_key_of_their_table():
    recipe = recipes.parse({"evaluate": {"every": 3, "clients": 7}, "memory_budget": "1MB"})
    assert (recipe.settings.evaluate_every, recipe.settings.evaluate_clients) == (3, 7)
    assert recipes.parse(tomllib.loads(recipe.to_toml())) == dataclasses.replace(recipe, fixed_split=True)


def test_minutes_between_checkpoints_are_a_key_of_their_table():
    recipe = recipes.parse({"checkpoint": {"every": 3, "minutes": 5}})
    assert (recipe.settings.checkpoint_every, recipe.settings.checkpoint_minutes) == (3, 5.0)
    assert recipes.parse({}).settings.checkpoint_minutes == 0
    assert recipes.parse(tomllib.loads(recipe.to_toml())).settings == recipe.settings
