"""The keys of a recipe, and recipes written as TOML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fedslr import models
from fedslr.algorithms import naming
from fedslr.core import schema
from fedslr.core.algorithm import Algorithm
from fedslr.data import DataOptions
from fedslr.engine.settings import Settings

SETTING_TABLES = {
    "personal": {"lr": "personal_lr", "optimizer": "personal_optimizer", "grad_clip": "personal_grad_clip"},
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


CHOICE_PATHS = dict.fromkeys(
    f"{dotted(setting)}.{key}"
    for setting, hint in schema.hints(Settings).items()
    if (choice := schema.choice_of(hint)) is not None
    for key in ["name", *(key for kind in choice.kinds.values() for key in schema.fields(kind))]
)
"""The paths of the options of all kinds of a setting that is a choice, such as `optimizer`; an ordered set."""


def paths(method: type[Algorithm[Any, Any, Any]]) -> list[str]:
    """Return the dotted path of every key of a single run of a method."""
    tables: dict[str, Iterable[str]] = {
        "algorithm": ["name", *schema.fields(method)],
        "data": schema.fields(DataOptions),
        "model": schema.fields(ModelOptions),
        **SETTING_TABLES,
    }
    return [*PLAIN, *(f"{table}.{key}" for table, keys in tables.items() for key in keys), *CHOICE_PATHS]


def paths_of(key: str, method: type[Algorithm[Any, Any, Any]]) -> list[str]:
    """Return the paths that a key may mean: itself, or every path whose last name it is.

    An option of an optimizer or a schedule comes last, so that it hides no hyperparameter of a method.
    """
    known = paths(method)
    found = [key] if key in known else [path for path in known if path.rpartition(".")[2] == key]
    return [path for path in found if path not in CHOICE_PATHS] or found


def dump(
    settings: Settings, algorithm: Algorithm[Any, Any, Any], data: Mapping[str, Any], model: Mapping[str, Any]
) -> str:
    """Return a recipe as TOML."""
    method = {"name": naming.name_of(type(algorithm)), **dataclasses.asdict(algorithm)}  # type: ignore[call-overload]
    plain, grouped = setting_tables(settings)
    lines = [f"{name} = {toml_value(value)}" for name, value in plain.items()]
    for name, table in {"algorithm": method, "data": data, "model": model, **grouped}.items():
        lines += ["", f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def setting_tables(settings: Settings) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return all settings that are given, as a recipe has them: the plain ones, and the others by their tables."""

    def given(names: Mapping[str, str]) -> dict[str, Any]:
        values = {key: getattr(settings, name) for key, name in names.items()}
        return {k: schema.to_table(v) if dataclasses.is_dataclass(v) else v for k, v in values.items() if v is not None}

    grouped = {table: given(keys) for table, keys in SETTING_TABLES.items()}
    return given({name: name for name in PLAIN}), {table: keys for table, keys in grouped.items() if keys}


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
            lines += _kinds(option.name) if not name else []
    return "\n".join(lines) + "\n" + OTHER_TABLES


def _kinds(setting: str) -> list[str]:
    """Return a comment for every option of a setting that is a choice, with the kinds that have the option."""
    choice = schema.choice_of(schema.hints(Settings)[setting])
    kinds_with: dict[schema.Option, list[str]] = {}
    for name, kind in choice.kinds.items() if choice else ():
        for option in schema.describe(kind):
            kinds_with.setdefault(option, []).append(name)
    lines = []
    for option, names in kinds_with.items():
        line = f"#   {option.name} =" + ("" if option.default is None else f" {toml_value(option.default)}")
        lines.append(f"{line:<28}  # of {', '.join(names)}: {option.help}; {option.kind}")
    return lines


def toml_value(value: Any) -> str:
    """Return a value as TOML. A table is written in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items() if v is not None) + " }"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)
