"""Recipes as text: the keys of a recipe, and writing one as TOML."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fedslr import models
from fedslr.algorithms import naming
from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.data import DataOptions
from fedslr.engine.settings import Settings

TABLES = {
    "evaluate": {"every": "evaluate_every", "clients": "evaluate_clients"},
    "checkpoint": {"every": "checkpoint_every", "minutes": "checkpoint_minutes"},
}
"""Settings that a recipe groups in a table, as the settings call them."""


GROUPED = {field: (table, key) for table, keys in TABLES.items() for key, field in keys.items()}


PLAIN = [name for name in schema.fields(Settings) if name not in GROUPED]


EXPERIMENT = ("methods", "compare", "sweep")
"""Tables that say what `fedslr compare` and `fedslr sweep` do; a single run leaves them aside."""


KEYS = [*PLAIN, "algorithm", "data", "model", *TABLES, *EXPERIMENT]


@dataclass(frozen=True)
class ModelOptions:
    """A recipe's `model` table."""

    name: Annotated[str, f"{', '.join(models.MODELS)}, or module:function of your own"] = "cnn"

    def __post_init__(self) -> None:
        models.find(self.name)


def dump(settings: Settings, algorithm: Algorithm[Any, Any], data: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """A recipe as TOML."""
    values = dataclasses.asdict(settings)
    method = {"name": naming.name_of(type(algorithm)), **dataclasses.asdict(algorithm)}  # type: ignore[call-overload]
    lines = [f"{name} = {toml_value(values[name])}" for name in PLAIN if values[name] is not None]
    tables: dict[str, Mapping[str, Any]] = {"algorithm": method, "data": data, "model": model}
    for name, keys in TABLES.items():
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

# [federation]  # for fedslr federation start: see docs/deploy.md
"""


def template(method: str) -> str:
    """A recipe with every key at its default and what it means; those without a default are comments."""
    algorithm = naming.find(method, "algorithm.name")
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
    for name, keys in TABLES.items():
        tables[name] = [settings[field]._replace(name=key) for key, field in keys.items()]
    lines: list[str] = []
    for name, options in tables.items():
        lines += ["", f"[{name}]"] if name else []
        for option in options:
            given = _as_line(option)
            meaning = "; ".join(filter(None, (option.help, "" if option.kind == "a text" else option.kind)))
            lines.append(f"{given:<28}  # {' '.join(meaning.split())}" if meaning else given)
    return "\n".join(lines) + "\n" + OTHER_TABLES


def _as_line(option: schema.Option) -> str:
    """A key and its default; a comment where it has none, or one that TOML cannot say."""
    line = f"{option.name} = {toml_value(option.default)}" if option.default is not None else ""
    try:
        said = tomllib.loads(line)
    except ValueError:
        said = {}
    return line if said == {option.name: option.default} else f"# {option.name} ="


def toml_value(value: str | bool | float) -> str:
    """A value as TOML writes it."""
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
