"""The keys of a recipe, and recipes written as TOML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fedslr import models
from fedslr.algorithms import naming
from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.data import DataOptions
from fedslr.engine.settings import Settings

SETTING_TABLES = {
    "evaluate": {"every": "evaluate_every", "clients": "evaluate_clients"},
    "checkpoint": {"every": "checkpoint_every", "minutes": "checkpoint_minutes"},
}
"""The tables of a recipe that group settings: the settings' names by table and key."""
GROUPED = {field: (table, key) for table, keys in SETTING_TABLES.items() for key, field in keys.items()}
PLAIN = [name for name in schema.fields(Settings) if name not in GROUPED]
KEYS = [*PLAIN, "algorithm", "data", "model", *SETTING_TABLES, "methods", "compare", "sweep"]
"""The top-level keys of a recipe. A single run ignores `methods`, `compare` and `sweep`."""


@dataclass(frozen=True)
class ModelOptions:
    """A recipe's `model` table."""

    name: Annotated[str, f"{', '.join(models.MODELS)}, or module:function of your own"] = "cnn"

    def __post_init__(self) -> None:
        models.find_model(self.name)


def dotted(setting: str) -> str:
    """Return the key of a setting in a recipe, such as evaluate.every."""
    return ".".join(GROUPED.get(setting, (setting,)))


def paths(method: type[Algorithm[Any, Any, Any]]) -> list[str]:
    """Return the dotted path of every key of a single run of a method."""
    tables = {
        "algorithm": ["name", *schema.fields(method)],
        "data": schema.fields(DataOptions),
        "model": schema.fields(ModelOptions),
        **SETTING_TABLES,
    }
    return [*PLAIN, *(f"{table}.{key}" for table, keys in tables.items() for key in keys)]


def paths_of(key: str, method: type[Algorithm[Any, Any, Any]]) -> list[str]:
    """Return the paths that a key may mean: itself, or every path whose last name it is."""
    known = paths(method)
    return [key] if key in known else [path for path in known if path.rpartition(".")[2] == key]


def dump(
    settings: Settings, algorithm: Algorithm[Any, Any, Any], data: Mapping[str, Any], model: Mapping[str, Any]
) -> str:
    """Return a recipe as TOML."""
    values = dataclasses.asdict(settings)
    method = {"name": naming.name_of(type(algorithm)), **dataclasses.asdict(algorithm)}  # type: ignore[call-overload]
    lines = [f"{name} = {toml_value(values[name])}" for name in PLAIN if values[name] is not None]
    tables: dict[str, Mapping[str, Any]] = {"algorithm": method, "data": data, "model": model}
    for name, keys in SETTING_TABLES.items():
        tables[name] = {key: values[field] for key, field in keys.items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


OTHER_TABLES = """
# [compare]  # for fedslr compare
# methods = ["fedslr", "fedavg"]
# seeds = [0, 1, 2]

# [methods]  # hyperparameters of those it is compared with
# ditto = { lam = 1.0 }

# [sweep]  # for fedslr sweep: every combination
# lr = [0.1, 0.01]

# [federation]  # for fedslr federation start: see docs/guide/deploy.md
"""


def template(method: str) -> str:
    """Return a recipe with every key, its default and its meaning; keys without a default are comments."""
    algorithm = naming.find(method, "recipe")
    settings = {option.name: option for option in schema.describe(Settings)}
    tables: dict[str, list[schema.Option]] = {
        "": [settings[name] for name in PLAIN],
        "algorithm": [
            schema.Option("name", "", naming.name_of(algorithm), "fedslr algorithms lists ours; or module:Class"),
            *schema.describe(algorithm),
        ],
        "data": schema.describe(DataOptions),
        "model": schema.describe(ModelOptions),
    }
    for name, keys in SETTING_TABLES.items():
        tables[name] = [settings[field]._replace(name=key) for key, field in keys.items()]
    lines: list[str] = []
    for name, options in tables.items():
        lines += ["", f"[{name}]"] if name else []
        for option in options:
            line = f"# {option.name} =" if option.default is None else f"{option.name} = {toml_value(option.default)}"
            meaning = "; ".join(filter(None, (option.help, "" if option.kind == "a text" else option.kind)))
            lines.append(f"{line:<28}  # {' '.join(meaning.split())}" if meaning else line)
    return "\n".join(lines) + "\n" + OTHER_TABLES


def toml_value(value: str | bool | float) -> str:
    """Return a value as TOML."""
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
