"""What a deployed federation is asked to do: a recipe, and a table `federation` beside it."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fedslr import models
from fedslr.core import schema
from fedslr.core.errors import FedslrError
from fedslr.core.problem import Task
from fedslr.core.schema import Rule, countable, countable_from_zero, memory_size, positive
from fedslr.run import recipe_text, recipes
from fedslr.run.recipes import Recipe
from fedslr.tasks import losses

shape_text = Rule("such as 3x32x32", lambda v: re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", v) is not None)


@dataclass(frozen=True)
class FederationOptions:
    """A recipe's `federation` table: what a simulation knows from its data, and how long a round waits."""

    inputs: Annotated[str, shape_text, "shape of one input"]
    classes: Annotated[int, countable, "number of labels"]
    crop_padding: Annotated[
        int, countable_from_zero, "zero pixels around training images for random crops; 0: none"
    ] = 0
    deadline: Annotated[float, positive, "seconds a round waits for its cohort"] = 600.0
    minimum: Annotated[int | None, countable, "uploads a round needs; half its cohort unless given"] = None
    attempts: Annotated[int, countable, "how often a round is tried before the run stops"] = 10
    max_bytes: Annotated[int | str | None, memory_size, "largest upload; twice a dense model unless given"] = None
    norm_bound: Annotated[float | None, positive, "longest upload that is counted whole; of others, a share"] = None
    joining: Annotated[bool, "whether new clients may join once the run has begun"] = True
    keys: Annotated[
        str | None, "folder with CLIENT.pub for every client; unless given, a number is its first claimer's"
    ] = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.inputs.split("x"))

    def needed(self, cohort: int) -> int:
        """Uploads that a round with such a cohort needs."""
        return min(cohort, self.minimum or -(-cohort // 2))


@dataclass(frozen=True)
class Deployment:
    """A complete, checked request for a deployed federation."""

    recipe: Recipe
    options: FederationOptions

    def task(self) -> Task:
        """The model by its name, on the device and in the precision asked for, and what it is trained by."""
        settings = self.recipe.settings
        module = models.make(self.recipe.model.name, self.options.shape, self.options.classes, settings.seed)
        module = module.to(settings.torch_device(), settings.torch_dtype())
        return Task(module, losses.find(settings.loss), settings.weight_decay)

    def require_sound(self) -> None:
        """Refuse what could only fail later, far from who asked for it."""
        if self.recipe.model.name in models.MODELS:
            models.make(self.recipe.model.name, self.options.shape, self.options.classes, seed=0)

    def to_toml(self) -> str:
        """All of it, defaults written out."""
        table = {k: v for k, v in dataclasses.asdict(self.options).items() if v is not None}
        lines = "".join(f"{key} = {recipe_text.toml_value(value)}\n" for key, value in table.items())
        return f"{self.recipe.to_toml()}\n[federation]\n{lines}"


def parse(table: dict[str, Any], as_recipe: Callable[[Mapping[str, Any]], Recipe] = recipes.parse) -> Deployment:
    """A deployment from its parsed TOML."""
    rest = {key: value for key, value in table.items() if key != "federation"}
    given = table.get("federation", {})
    if not isinstance(given, dict):
        raise FedslrError(f'federation: got {schema.show(given)}, expected a table such as {{ inputs = "3x32x32" }}')
    for key in ("inputs", "classes"):
        if key not in given:
            raise FedslrError(f"federation.{key} is missing: the server sees no data, so it has to be told")
    return Deployment(as_recipe(rest), schema.build(FederationOptions, given, "federation"))


def from_text(text: str, changes: Sequence[str] = ()) -> Deployment:
    """A deployment from a recipe's text, with `key=value` changes applied."""
    try:
        return parse(recipes.apply(tomllib.loads(text), changes))
    except tomllib.TOMLDecodeError as error:
        raise FedslrError(f"the recipe is not valid TOML: {error}") from None


def demo(changes: Sequence[str] = ()) -> Deployment:
    """The demo's federation."""
    return from_text(files("fedslr.deploy").joinpath("demo.toml").read_text("utf-8"), changes)


def read(path: Path, changes: Sequence[str] = ()) -> Deployment:
    """A deployment from a recipe file with a table `federation`, with `key=value` changes applied."""
    return recipes.read_as(lambda table: parse(table, recipes.complete), path, changes)
