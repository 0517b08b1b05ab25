"""Recipes: what a run is asked to do, in TOML, every key and value checked before anything starts."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch

from fedslr import losses, models, naming, plugins, schema
from fedslr.data import DataOptions
from fedslr.engine import cohort
from fedslr.errors import FedslrError, suggest
from fedslr.schema import (
    Rule,
    countable,
    countable_from_zero,
    fraction,
    memory_size,
    non_negative,
    one_of,
    positive,
    seed_range,
)
from fedslr.types import Algorithm, Round

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEFAULT_COHORT = 10
CUSTOM = "custom"
"""The selection or the loss of a run that was given a function, which a recipe cannot name."""


def _function_name(known: Collection[str]) -> Rule:
    words = f"one of {', '.join(known)}, or module:function of your own"
    return Rule(words, lambda v: v in (*known, CUSTOM) or plugins.is_name(v))


selection_name, loss_name = _function_name(cohort.SELECTIONS), _function_name(losses.LOSSES)
Read = TypeVar("Read")


@dataclass(frozen=True)
class Settings:
    """What all methods share: the keywords of `fedslr.run` and the plain keys of a recipe. Defaults are the paper's."""

    rounds: Annotated[int, countable, "communication rounds"] = 1000
    clients_per_round: Annotated[int | None, countable, "cohort size; 10, or all where there are fewer"] = None
    batch_size: Annotated[int, countable, "samples per local step"] = 20
    epochs: Annotated[int, countable, "local passes for the global part"] = 2
    personal_epochs: Annotated[int, countable_from_zero, "local passes for a personal part"] = 1
    lr: Annotated[float, positive, "local step size of the first round"] = 0.1
    lr_decay: Annotated[float, fraction, "factor of the step size per round"] = 0.998
    weight_decay: Annotated[float, non_negative, "weight of ½‖v‖² in every local loss"] = 1e-3
    loss: Annotated[str, loss_name, "what local training makes small"] = "cross_entropy"
    selection: Annotated[str, selection_name, "how a round's clients are drawn"] = "uniform"
    seed: Annotated[int, seed_range, "of split, start, cohorts and batches"] = 0
    device: Annotated[str, "auto, cpu, cuda, cuda:1, …"] = "auto"
    dtype: Annotated[str, one_of(*DTYPES), "type of all numbers that are kept"] = "float32"
    engine: Annotated[str, one_of("auto", "eager", "batched", "cuda"), "how a cohort is trained"] = "auto"
    compile: Annotated[bool, "compile local training for a CPU; pays off in long runs"] = False
    precision: Annotated[
        str, one_of("auto", "float32", "tf32", "bf16"), "of float32 products on a GPU; auto: bf16 where it has it"
    ] = "auto"
    store: Annotated[str, one_of("memory", "disk"), "where clients' states live while the run goes on"] = "memory"
    memory_budget: Annotated[
        int | str | None, memory_size, "memory for clients' states; the rest is on disk; no limit unless given"
    ] = None
    diagnostics: Annotated[bool, "record the quantities of the convergence theory on evaluation rounds"] = False
    evaluate_every: Annotated[int, countable, "rounds between evaluations; the last round always is one"] = 5
    evaluate_clients: Annotated[int | None, countable, "clients evaluated, always the same; all unless given"] = None
    checkpoint_every: Annotated[int, countable, "rounds between checkpoints"] = 1
    checkpoint_minutes: Annotated[
        float, non_negative, "minutes between checkpoints, at least; the last round is always saved"
    ] = 0.0

    def __post_init__(self) -> None:
        if self.store == "disk" and self.memory_budget is not None:
            raise FedslrError(
                "memory_budget: store = 'disk' keeps no states in memory; expected store = 'memory' or no budget"
            )

    def memory_bytes(self) -> int | None:
        """Bytes that clients' states may take in memory, those in use aside; None is no limit."""
        if self.store == "disk":
            return 0
        return None if self.memory_budget is None else schema.in_bytes(self.memory_budget)

    def cohort_size(self, num_clients: int) -> int:
        if self.clients_per_round is None:
            return min(DEFAULT_COHORT, num_clients)
        if self.clients_per_round > num_clients:
            raise FedslrError(
                f"clients_per_round: got {self.clients_per_round}, but there are only {num_clients} clients; "
                f"expected 1 to {num_clients}"
            )
        return self.clients_per_round

    def round(self, number: int) -> Round:
        """What clients have to know of a round, counted from 0."""
        decay = self.lr_decay**number
        return Round(number, self.rounds, self.lr * decay, decay, self.epochs, self.personal_epochs)

    def is_evaluated(self, done: int) -> bool:
        """Whether the clients are evaluated once so many rounds are done."""
        return done % self.evaluate_every == 0 or done == self.rounds

    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def settled(self) -> Settings:
        """The same with the precision that is `auto` on this machine, as a run folder keeps it.

        The CUDA engine multiplies in bfloat16, the others exactly. What that does to training: results/precision.
        """
        if self.precision != "auto":
            return self
        fast = self.engine in ("auto", "cuda") and self.dtype == "float32" and self.torch_device().type == "cuda"
        rounded = fast and torch.cuda.is_bf16_supported(including_emulation=False)
        return replace(self, precision="bf16" if rounded else "float32")

    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise FedslrError(f"device: got '{self.device}', which this machine cannot use; try auto or cpu") from error
        return device


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
    cohort.find(recipe.settings.selection)
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


RESUMABLE = {"rounds", "device", "store", "memory_budget", "evaluate_every", "checkpoint_every", "checkpoint_minutes"}
"""What may differ between a run and its resumption: nothing that changes a round already made."""


FORMER = {"precision": "float32"}
"""What was the case before there was a setting, where that is not its default."""


def lasting(algorithm: Algorithm[Any, Any]) -> list[str]:
    """Settings that a run of this method goes on with, though those of others may change."""
    return ["rounds"] if algorithm.planned else []


def difference(old: str, new: str, called: str, fixed: Collection[str] = ()) -> str | None:
    """The first key that forbids going on from one dumped recipe to another, with both values; None if none does.

    `called` is what the method is called now. Double precision was always multiplied exactly, whatever was written.
    """
    was, now = (flatten(tomllib.loads(text)) for text in (old, new))
    before, after = with_former(was), with_former(now)
    allowed = {dotted(k) for k in RESUMABLE} - set(fixed)
    if before.get("dtype") == "float64":
        allowed.add("precision")
    if "loss" not in was:
        allowed.add("loss")  # it was not written down; what a checkpoint knows of it is compared where it is read
    for key in sorted(before.keys() | after.keys(), key=lambda key: (key != "algorithm.name", key)):
        if key == "algorithm.name" and naming.are_same(str(before.get(key)), str(after.get(key)), called):
            continue
        if key not in allowed and before.get(key) != after.get(key):
            why = f"; rounds of {called} depend on it from the first on" if key in map(dotted, fixed) else ""
            return f"{key} was {schema.show(before.get(key))}, now {schema.show(after.get(key))}{why}"
    return None


def with_former(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a dumped recipe, flat. One that it lacks, having been written before there was such a setting, is
    what it was then: its default, but for those in `FORMER`."""
    defaults = {dotted(option.name): option.default for option in schema.describe(Settings)}
    return {**defaults, **FORMER, **settings}


def dotted(setting: str) -> str:
    """A setting as recipes write it."""
    return ".".join(GROUPED.get(setting, (setting,)))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
