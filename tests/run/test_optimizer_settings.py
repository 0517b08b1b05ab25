"""Optimizers in recipes, on the command line and in Python, and the combinations that are refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedslr
from conftest import make_federation, mlp
from fedslr.core.optimizers import SGD, Adam, Momentum
from fedslr.engine.schedules import Cosine, Exponential, Step
from fedslr.run import experiments, recipe_text, recipes
from fedslr.run.folders import difference

FULL = {
    "optimizer": {"name": "adam", "beta2": 0.99},
    "schedule": {"name": "step", "period": 3},
    "personal": {"lr": 0.01, "optimizer": "sgd", "grad_clip": 0},
    "server_optimizer": {"name": "yogi", "lr": 0.1},
    "grad_clip": 2,
    "local_steps": 5,
}


def test_a_name_or_a_table_describes_an_optimizer() -> None:
    assert recipes.parse({"optimizer": "adam"}).settings.optimizer == Adam()
    assert recipes.parse({"optimizer": {"name": "adam", "beta2": 0.99}}).settings.optimizer == Adam(beta2=0.99)
    assert recipes.parse({}).settings.optimizer == SGD()
    assert recipes.parse({"schedule": {"warmup": 3}}).settings.schedule == Exponential(warmup=3)


def test_a_recipe_with_all_of_it_is_its_own_dump() -> None:
    recipe = recipes.parse(FULL)
    assert recipe.settings.schedule == Step(period=3)
    assert recipes.parse(tomllib.loads(recipe.to_toml())).settings == recipe.settings


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (["optimizer=adam", "optimizer.beta2=0.99"], Adam(beta2=0.99)),
        (["optimizer.name=momentum", "optimizer.momentum=0.5"], Momentum(momentum=0.5)),
        (["optimizer.momentum=0.5"], Momentum(momentum=0.5)),
    ],
)
def test_settings_of_an_optimizer_are_dotted(changes: list[str], wanted: Any) -> None:
    table = {"optimizer": "momentum"} if len(changes) == 1 else {}
    assert recipes.parse(recipes.apply(table, changes)).settings.optimizer == wanted


def test_a_bare_name_means_an_option_of_an_optimizer_only_if_it_means_nothing_else() -> None:
    assert recipe_text.paths_of("name", fedslr.FedAvg) == ["algorithm.name", "data.name", "model.name"]
    assert recipe_text.paths_of("warmup", fedslr.FedAvg) == ["schedule.warmup"]
    assert recipe_text.paths_of("lr", fedslr.FedAvg) == ["lr"]


def test_python_takes_the_tables_of_a_recipe() -> None:
    built = recipes.build_settings(FULL)
    assert built == recipes.parse(FULL).settings
    assert recipes.build_settings({"optimizer": Adam(), "personal_lr": 0.2}).personal_lr == 0.2
    assert recipes.build_settings({"evaluate": {"every": 3}}).evaluate_every == 3


def test_a_sweep_reaches_the_settings_of_an_optimizer(tmp_path: Path) -> None:
    recipe = recipes.parse({"algorithm": {"name": "fedavg"}, "optimizer": "adam"})
    jobs = experiments.sweep(recipe, {"optimizer.beta2": [0.9, 0.99], "schedule": ["cosine"]}, [0], tmp_path)
    assert [job.recipe.settings.optimizer for job in jobs] == [Adam(beta2=0.9), Adam(beta2=0.99)]
    assert jobs[0].recipe.settings.schedule == Cosine()


def test_a_config_of_an_earlier_version_is_that_of_the_defaults() -> None:
    new = recipes.parse({}).to_toml()
    later = ("schedule", "optimizer", "grad_clip")
    old = "\n".join(line for line in new.splitlines() if not line.startswith(later))
    assert "optimizer" not in old
    assert difference(old, new) is None
    assert difference(old, recipes.parse({"optimizer": "adam"}).to_toml()) == 'optimizer.name was "sgd", now "adam"'
    assert difference(recipes.parse({"personal": {"lr": 1}}).to_toml(), old) == "personal.lr was 1.0, now null"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"optimizer": "adan"}, 'optimizer: got "adan", expected one of sgd, momentum, nesterov, adam, adamw, or'),
        ({"optimizer": {"name": "adam", "beta1": 1}}, "optimizer.beta1: got 1, expected a number from 0 to below 1"),
        ({"optimizer": {"momentum": 0.9}}, "unknown key 'momentum' in optimizer 'sgd'; it takes no options"),
        ({"optimizer": 3}, "optimizer: got 3, expected one of sgd, "),
        (
            {"schedule": "step"},
            "schedule.period is missing (rounds between two changes of the step size); give",
        ),
        ({"server_optimizer": {"lr": 1}}, 'server_optimizer: got {"lr": 1}, expected one of momentum, adam, yogi, '),
        ({"personal": {"optimizer": "lbfgs"}}, 'personal.optimizer: got "lbfgs", expected one of sgd, '),
        ({"personal": 1}, "personal: got 1, expected a table [personal]"),
        ({"grad_clip": -1}, "grad_clip: got -1, expected a number 0 or above"),
        ({"local_steps": 0}, "local_steps: got 0, expected a whole number from 1"),
        ({"personal_lr": 1}, "did you mean 'personal.lr'?"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_values_are_told_in_one_line(table: dict[str, Any], said: str) -> None:
    with pytest.raises(fedslr.FedslrError, match=re.escape(said)) as error:
        recipes.parse(table)
    assert "\n" not in str(error.value)


def train(name: str, **options: Any) -> fedslr.Result:
    return fedslr.run(fedslr.ALGORITHMS[name](), make_federation([5, 6]), mlp(), rounds=1, **options)


PERSONAL = 'set personal = { optimizer = "sgd", grad_clip = 0 }'


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "fedslr",
            {"optimizer": "adam"},
            f"but fedslr's personal phase needs sgd without grad_clip; {PERSONAL}",
        ),
        ("fedslr", {"grad_clip": 1}, "'sgd' with grad_clip = 1, but fedslr's personal phase needs sgd without"),
        ("gpgd", {"optimizer": "nesterov"}, f"gpgd's personal phase needs sgd without grad_clip; {PERSONAL}"),
        ("sparse-sparse", {"personal": {"optimizer": "adamw"}}, "'adamw', but sparse-sparse's personal phase needs"),
        ("lpgd", {"optimizer": "momentum", "personal": {"optimizer": "sgd"}}, "lpgd's global phase needs sgd"),
        *(
            (name, options, f"{name}'s global phase needs sgd without grad_clip; set ")
            for name in ("scaffold", "apfl", "perfedavg", "pfedme")
            for options in ({"optimizer": "adam"}, {"grad_clip": 0.5})
        ),
    ],
)
def test_methods_refuse_what_breaks_their_formulas(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(fedslr.FedslrError, match=re.escape(said)) as error:
        train(name, **options)
    assert "\n" not in str(error.value)


def test_a_comparison_refuses_before_its_first_run(tmp_path: Path) -> None:
    recipe = recipes.parse({"optimizer": "adam"})
    assert len(experiments.comparison(recipe, ["fedavg", "feddyn"], [0], tmp_path)) == 2
    with pytest.raises(fedslr.FedslrError, match="scaffold's global phase needs sgd"):
        experiments.comparison(recipe, ["fedavg", "scaffold"], [0], tmp_path)


def test_fedslr_takes_any_optimizer_in_phase_one() -> None:
    train("fedslr", optimizer="adam", grad_clip=1, personal={"optimizer": "sgd", "grad_clip": 0})
