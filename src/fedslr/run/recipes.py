"""Recipes: what a run is asked to do, in TOML, every key and value checked before anything starts."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedslr.algorithms import naming
from fedslr.core import plugins, schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, suggest
from fedslr.core.toml import flatten
from fedslr.data import DataOptions
from fedslr.engine import selection
from fedslr.engine.settings import CUSTOM, Settings, loss_name, selection_name
from fedslr.run.recipe_text import GROUPED, KEYS, PLAIN, TABLES, ModelOptions, dump
from fedslr.run.resumption import dotted
from fedslr.tasks import losses

Read = TypeVar("Read")


@dataclass(frozen=True)
class CompareOptions:
    """A recipe's `compare` table."""

    methods: tuple[str, ...] = ("fedslr", "fedavg")
    seeds: tuple[int, ...] = ()
    """None: the recipe's own."""


@dataclass(frozen=True)
class Recipe:
    """A complete, checked request."""

    settings: Settings
    algorithm: Algorithm[Any, Any]
    data: DataOptions
    model: ModelOptions
    methods: Mapping[str, Algorithm[Any, Any]] = dataclasses.field(default_factory=dict)
    """Methods to compare with, with the hyperparameters the recipe gives them."""
    compare: CompareOptions = dataclasses.field(default_factory=CompareOptions)
    sweep: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    fixed_split: bool = False
    """Whether the recipe gives the split a seed of its own, which then stays when the run's seed changes."""

    def to_toml(self) -> str:
        """All of one run, defaults written out: running it again gives the same run."""
        return dump(self.settings, self.algorithm, dataclasses.asdict(self.data), dataclasses.asdict(self.model))

    def to_table(self) -> dict[str, Any]:
        return tomllib.loads(self.to_toml())

    def method(self, name: str) -> Algorithm[Any, Any]:
        """A method as this recipe wants it."""
        cls = naming.find(name, "methods")
        known = (*self.methods.values(), self.algorithm)
        return next((method for method in known if type(method) is cls), None) or make_algorithm({"name": name})

    def locate(self, key: str) -> str:
        """The dotted path of a key that may be given by its last name: `rank_penalty` is `algorithm.rank_penalty`."""
        if key in ("seed", "data.seed"):
            raise FedslrError(f"sweep: '{key}' is not swept over; give several seeds with --seeds")
        tables = {"algorithm": type(self.algorithm), "data": DataOptions}
        unset = [f"{table}.{name}" for table, cls in tables.items() for name in schema.fields(cls)]
        known = [path for path in dict.fromkeys([*flatten(self.to_table()), *PLAIN, *unset]) if "seed" not in path]
        found = [path for path in known if key in (path, path.rpartition(".")[2])]
        if not found:
            raise FedslrError(
                f"sweep: unknown key '{key}'; {suggest(key, [*known, *(k.rpartition('.')[2] for k in known)])}"
            )
        if len(found) > 1 and key not in found:
            raise FedslrError(f"sweep: '{key}' may be {' or '.join(found)}; write one of them")
        return key if key in found else found[0]


def make_algorithm(table: Mapping[str, Any], where: str = "algorithm") -> Algorithm[Any, Any]:
    """A method from a table with its name and hyperparameters."""
    cls = naming.find(table.get("name", "fedslr"), "algorithm.name" if where == "algorithm" else where)
    with plugins.mistakes(where, naming.name_of(cls), cls):
        return schema.build(cls, {k: v for k, v in table.items() if k != "name"}, where)


def parse(table: Mapping[str, Any]) -> Recipe:
    """A recipe from its parsed TOML."""
    for key, value in table.items():
        if key == "federation":
            raise FedslrError(
                "a recipe with a table `federation` is a deployment's; it goes to fedslr federation start"
            )
        if key not in KEYS:
            places = _places(table, key)
            hint = f"did you mean {' or '.join(map(repr, places))}?" if places else suggest(key, KEYS)
            raise FedslrError(f"unknown key '{key}' in the recipe; {hint}")
        if key not in PLAIN and not isinstance(value, Mapping):
            examples = {
                "sweep": "{ lr = [0.1, 0.01] }",
                "compare": "{ seeds = [0, 1] }",
                "methods": "{ ditto = { lam = 1 } }",
            }
            example = examples.get(key, "{ every = 5 }" if key in TABLES else '{ name = "…" }')
            raise FedslrError(f"{key}: got {schema.show(value)}, expected a table such as {example}")
    flat = {k: table[k] for k in PLAIN if k in table}
    for name, keys in TABLES.items():
        for key, value in table.get(name, {}).items():
            if key not in keys:
                raise FedslrError(f"unknown key '{key}' in {name}; {suggest(key, keys)}")
            flat[keys[key]] = schema.check_value(f"{name}.{key}", value, schema.hints(Settings)[keys[key]])
    settings = schema.build(Settings, flat)
    data = schema.build(DataOptions, table.get("data", {}), "data")
    fixed = data.seed is not None
    if not fixed:
        data = dataclasses.replace(data, seed=settings.seed)
    model = schema.build(ModelOptions, table.get("model", {}), "model")
    settings.cohort_size(data.clients)
    for name, rule in (("selection", selection_name), ("loss", loss_name)):
        if getattr(settings, name) == CUSTOM:
            raise FedslrError(f"{name}: got '{CUSTOM}', expected {rule.words}")
    return Recipe(
        settings, make_algorithm(table.get("algorithm", {})), data, model, **_experiment(table), fixed_split=fixed
    )


def _places(table: Mapping[str, Any], key: str) -> list[str]:
    """Where a key may belong that stands outside of its table."""
    if key in GROUPED:
        return [dotted(key)]
    known = {"algorithm": ["name"], "data": schema.fields(DataOptions), "model": schema.fields(ModelOptions)}
    with suppress(FedslrError, AttributeError):
        known["algorithm"] += schema.fields(naming.find(table.get("algorithm", {}).get("name", "fedslr")))
    return [f"{name}.{key}" for name, keys in known.items() if key in keys]


def _experiment(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables `methods`, `compare` and `sweep`."""
    methods = {}
    for name, options in table.get("methods", {}).items():
        if not isinstance(options, Mapping):
            raise FedslrError(f"methods.{name}: got {schema.show(options)}, expected a table of hyperparameters")
        methods[name] = make_algorithm({**options, "name": name}, f"methods.{name}")
    given = table.get("compare", {})
    for key, kind, words in (("methods", str, "method names"), ("seeds", int, "whole numbers")):
        values = given.get(key, [])
        if not isinstance(values, list) or any(type(v) is not kind for v in values):
            raise FedslrError(f"compare.{key}: got {schema.show(values)}, expected a list of {words}")
    for name in given.get("methods", []):
        make_algorithm({"name": name}, "compare.methods")
    if unknown := [k for k in given if k not in schema.fields(CompareOptions)]:
        raise FedslrError(
            f"unknown key '{unknown[0]}' in compare; {suggest(unknown[0], schema.fields(CompareOptions))}"
        )
    compare = CompareOptions(**{k: tuple(v) for k, v in given.items()})
    for key, values in table.get("sweep", {}).items():
        if not isinstance(values, list) or not values:
            raise FedslrError(f"sweep.{key}: got {schema.show(values)}, expected a list of values")
    return {"methods": methods, "compare": compare, "sweep": table.get("sweep", {})}


def read(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a file, with `key=value` changes applied."""
    return read_as(complete, path, changes)


def complete(table: Mapping[str, Any]) -> Recipe:
    """A recipe from its parsed TOML that is run here: a selection and a loss of one's own are there too."""
    recipe = parse(table)
    selection.find(recipe.settings.selection)
    losses.find(recipe.settings.loss)
    return recipe


def read_as(parse: Callable[[dict[str, Any]], Read], path: Path, changes: Sequence[str] = ()) -> Read:
    """Whatever is parsed from a recipe file, with `key=value` changes applied."""
    try:
        table = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise FedslrError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FedslrError(f"{path}: cannot be read as a recipe: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FedslrError(f"{path}: not valid TOML: {error}") from None
    try:
        return parse(apply(table, changes))
    except FedslrError as error:
        raise FedslrError(f"{path}: {error}") from error


def apply(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Set dotted keys. Choosing another method drops the hyperparameters of the one the recipe had."""
    pairs = [_pair(text) for text in changes]
    # Methods first, so that a hyperparameter given before its method's name is not dropped.
    for key, value in sorted(pairs, key=lambda pair: pair[0] != "algorithm.name"):
        change(table, key, value)
    return table


def change(table: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted key."""
    old = table.get("algorithm", {})
    if path == "algorithm.name" and not (isinstance(old, dict) and old.get("name", "fedslr") == value):
        table["algorithm"] = {}
    *tables, last = path.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise FedslrError(f"{path}: '{name}' is no table of the recipe")
    table[last] = value


def _pair(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise FedslrError(f"--set: got '{change}', expected key=value, such as --set lr=0.05")
    return key, value_of(text)


def value_of(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["value"] if len(table) == 1 else text.strip()
