"""Recipes: the request for a run, in TOML; every key and value is checked before anything starts."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedslr.algorithms import naming
from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.core.errors import FedslrError, suggest
from fedslr.data import DataOptions
from fedslr.engine import selection
from fedslr.engine.settings import CUSTOM, Settings, loss_name, selection_name
from fedslr.run.recipe_text import (
    GROUPED,
    KEYS,
    PLAIN,
    SETTING_TABLES,
    ModelOptions,
    dotted,
    dump,
    paths,
    paths_of,
)
from fedslr.tasks import metrics

Request = TypeVar("Request")


@dataclass(frozen=True)
class CompareOptions:
    """A recipe's `compare` table. Without seeds, a comparison takes the recipe's own."""

    methods: tuple[str, ...] = ("fedslr", "fedavg")
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A complete, checked request."""

    settings: Settings
    algorithm: Algorithm[Any, Any, Any]
    data: DataOptions
    model: ModelOptions
    methods: Mapping[str, Algorithm[Any, Any, Any]] = dataclasses.field(default_factory=dict)
    """Methods to compare with, with the hyperparameters that the recipe gives them."""
    compare: CompareOptions = dataclasses.field(default_factory=CompareOptions)
    sweep: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    fixed_split: bool = False
    """Whether the recipe gives the split a seed of its own, which then stays when the run's seed changes."""

    def to_toml(self) -> str:
        """Return one run as TOML with all defaults: running it again gives the same run."""
        return dump(self.settings, self.algorithm, dataclasses.asdict(self.data), dataclasses.asdict(self.model))

    def to_table(self) -> dict[str, Any]:
        return tomllib.loads(self.to_toml())

    def method(self, name: str) -> Algorithm[Any, Any, Any]:
        """Return a method with the hyperparameters that this recipe has for it, or its defaults."""
        cls = naming.find(name, "methods")
        known = (*self.methods.values(), self.algorithm)
        return next((method for method in known if type(method) is cls), None) or make_algorithm({"name": name})

    def locate(self, key: str) -> str:
        """Return the dotted path of a swept key that may be given by its last name, such as `rank_penalty`."""
        if key in ("seed", "data.seed"):
            raise FedslrError(f"{key}: seeds are not swept over; give several seeds with --seeds")
        found = paths_of(key, type(self.algorithm))
        if not found:
            known = paths(type(self.algorithm))
            hint = suggest(key, [*known, *(path.rpartition(".")[2] for path in known)])
            raise FedslrError(f"{key}: unknown key; {hint}")
        return _only(found, key)


def _only(found: Sequence[str], where: str) -> str:
    if len(found) > 1:
        raise FedslrError(f"{where}: may be {' or '.join(found)}; write one of them")
    return found[0]


def make_algorithm(table: Mapping[str, Any], where: str = "algorithm") -> Algorithm[Any, Any, Any]:
    """Return the method of a table with its name and hyperparameters."""
    cls = naming.find(table.get("name", "fedslr"), "algorithm.name" if where == "algorithm" else where)
    return schema.build(cls, {k: v for k, v in table.items() if k != "name"}, where)


def parse(table: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a parsed TOML file."""
    table = _without_compile(table)
    for key, value in table.items():
        if key in KEYS and key not in PLAIN:
            _require_table(key, value)
    _require_known(table, KEYS, "the recipe", lambda key: _hint(table, key))
    settings = build_settings({k: table[k] for k in (*PLAIN, *SETTING_TABLES) if k in table})
    data = schema.build(DataOptions, table.get("data", {}), "data")
    fixed = data.seed is not None
    if not fixed:
        data = dataclasses.replace(data, seed=settings.seed)
    model = schema.build(ModelOptions, table.get("model", {}), "model")
    settings.cohort_size(data.clients)
    method = make_algorithm(table.get("algorithm", {}))
    return Recipe(settings, method, data, model, **_experiment(table), fixed_split=fixed)


def build_settings(table: Mapping[str, Any]) -> Settings:
    """Return the settings of a recipe, or of keyword arguments: names of settings, and tables that group some."""
    flat = {k: v for k, v in table.items() if k not in SETTING_TABLES}
    kinds = schema.hints(Settings)
    for name, keys in SETTING_TABLES.items():
        options = table.get(name, {})
        _require_table(name, options)
        _require_known(options, keys, name)
        flat |= {keys[k]: schema.check_value(f"{name}.{k}", v, kinds[keys[k]]) for k, v in options.items()}
    return schema.build(Settings, flat)


def _without_compile(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept `compile = false`, which every config.toml of version 0.1 has; the setting was removed."""
    if table.get("compile", False) is not False:
        raise FedslrError("compile: compiled training on the CPU was removed; delete this line")
    return {key: value for key, value in table.items() if key != "compile"}


def _hint(table: Mapping[str, Any], key: str) -> str:
    """Return a hint for an unknown key: the table where it may belong, or the nearest known key."""
    if key == "federation":
        return "this recipe is a deployment's, for fedslr federation start"
    if key in GROUPED:
        return f"did you mean '{dotted(key)}'?"
    places = [f"'{path}'" for path in paths_of(key, naming.find(_method_name(table)))]
    return f"did you mean {' or '.join(places)}?" if places else suggest(key, KEYS)


def _method_name(table: Mapping[str, Any]) -> Any:
    given = table.get("algorithm", {})
    return given.get("name", "fedslr") if isinstance(given, dict) else "fedslr"


def _experiment(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables `methods`, `compare` and `sweep`."""
    methods = {}
    for name, options in table.get("methods", {}).items():
        _require_table(f"methods.{name}", options)
        methods[name] = make_algorithm({**options, "name": name}, f"methods.{name}")
    compare, sweep = table.get("compare", {}), table.get("sweep", {})
    _require_known(compare, schema.fields(CompareOptions), "compare")
    for name, options in (("compare", compare), ("sweep", sweep)):
        for key, values in options.items():
            if not isinstance(values, list):
                raise FedslrError(f"{name}.{key}: got {schema.show(values)}, expected a list")
    return {"methods": methods, "compare": CompareOptions(**{k: tuple(v) for k, v in compare.items()}), "sweep": sweep}


def _require_table(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise FedslrError(f"{key}: got {schema.show(value)}, expected a table [{key}]")


def _require_known(
    options: Mapping[str, Any], known: Collection[str], table: str, hint: Callable[[str], str] | None = None
) -> None:
    for key in options:
        if key not in known:
            raise FedslrError(f"unknown key '{key}' in {table}; {hint(key) if hint else suggest(key, known)}")


def read(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a file, with `key=value` changes applied."""
    return read_as(complete, path, changes)


def complete(table: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a parsed TOML file that runs on this machine, where a custom selection or loss must be."""
    recipe = parse(table)
    settings = recipe.settings
    for name, rule in (("selection", selection_name), ("loss", loss_name)):
        if getattr(settings, name) == CUSTOM:
            raise FedslrError(f"{name}: got '{CUSTOM}', expected {rule.words}; the run had its own in Python")
    selection.find(settings.selection)
    if settings.loss is not None:
        settings.loss_function()
    settings.for_task(settings.task or recipe.data.task())
    for name in settings.metrics:
        metrics.find(name)
    return recipe


def read_as(parse: Callable[[dict[str, Any]], Request], path: Path, changes: Sequence[str] = ()) -> Request:
    """Return the result of `parse` for a recipe file, with `key=value` changes applied."""
    text = _text(path)
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise FedslrError(f"{path}: this recipe is not valid TOML: {error}; correct that place") from None
    table = apply(table, changes)
    try:
        return parse(table)
    except FedslrError as error:
        raise FedslrError(f"{_place(parse, path, text, changes, str(error))}: {error}") from error


def _text(path: Path) -> str:
    """Return the text of a recipe's file."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise FedslrError(f"{path}: there is no such file; `fedslr recipes` lists the recipes of fedslr") from None
    except IsADirectoryError:
        kept = path / "config.toml"
        hint = f"its run has the recipe {kept}" if kept.exists() else "name a TOML file"
        raise FedslrError(f"{path}: a recipe is a file, but this is a folder; {hint}") from None
    except UnicodeDecodeError:
        raise FedslrError(f"{path}: this recipe is not text in UTF-8; name a TOML file") from None
    except OSError as error:
        raise FedslrError(f"{path}: this recipe cannot be read: {error.strerror}; change that, or copy it") from None


def _place(
    parse: Callable[[dict[str, Any]], Request], path: Path, text: str, changes: Sequence[str], mistake: str
) -> str:
    """Return where a mistake was made: in the recipe's file, or in the change without which it is not made."""

    def without(change: str | None) -> str | None:
        try:
            parse(apply(tomllib.loads(text), [c for c in changes if c is not change] if change else []))
        except FedslrError as error:
            return str(error)
        return None

    if not changes or without(None) == mistake:
        return str(path)
    left = {change: without(change) for change in changes}
    # Without the wrong change all is well. Without one that it builds on, such as the method's name, all is not.
    cures = [change for change in changes if left[change] is None]
    return f"--set {next(iter(cures or [c for c in changes if left[c] != mistake]), ' '.join(changes))}"


def apply(table: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Set keys by their path or their last name. Choosing another method drops the recipe's hyperparameters."""
    pairs = [_pair(text) for text in changes]
    # Methods first, so that a hyperparameter given before its method's name is not dropped.
    for key, value in sorted(pairs, key=lambda pair: pair[0] != "algorithm.name"):
        change(table, _path(table, key), value)
    return table


def _path(table: dict[str, Any], key: str) -> str:
    """Return the dotted path of a key of `--set`; an unknown key stays as it is, and `parse` refuses it."""
    if "." in key or key in KEYS:
        return key
    try:
        found = paths_of(key, naming.find(_method_name(table)))
    except FedslrError:
        return key
    return _only(found, f"--set {key}") if found else key


def change(table: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted key."""
    if path == "algorithm.name" and _method_name(table) != value:
        table["algorithm"] = {}
    *tables, last = path.split(".")
    for name in tables:
        if not isinstance(table.get(name), dict):
            # The name alone of one of several kinds is short for a table, as in optimizer = "adam".
            table[name] = {"name": table[name]} if isinstance(table.get(name), str) else {}
        table = table[name]
    table[last] = value


def _pair(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise FedslrError(f"--set: got '{change}', expected key=value, such as --set lr=0.05")
    return key, value_of(text)


def value_of(text: str) -> Any:
    """Return the value of a TOML literal, or the text itself if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text.strip()
