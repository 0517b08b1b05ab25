"""The request of a deployed federation: a recipe with a table `federation`."""

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
from fedslr.core.problem import Problem
from fedslr.core.schema import Rule, countable, countable_from_zero, memory_size, positive
from fedslr.core.targets import outputs_for
from fedslr.engine.setup import require_optimizers
from fedslr.run import recipe_text, recipes
from fedslr.run.recipes import Recipe
from fedslr.tasks.scoring import Scorer

shape_text = Rule("such as 3x32x32", lambda v: re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", v) is not None)


@dataclass(frozen=True)
class FederationOptions:
    """The table `federation` of a recipe: the form of the data, and the limits of a round."""

    inputs: Annotated[str, shape_text, "shape of one input"]
    classes: Annotated[int, countable, "number of classes, labels or targets"]
    crop_padding: Annotated[
        int, countable_from_zero, "zero pixels around training images for random crops; 0: none"
    ] = 0
    deadline: Annotated[float, positive, "seconds a round waits for its cohort"] = 600.0
    minimum: Annotated[int | None, countable, "uploads a round needs; half its cohort unless given"] = None
    attempts: Annotated[int, countable, "attempts at a round before the run stops"] = 10
    max_bytes: Annotated[
        int | str | None, memory_size, "largest upload; twice the client's dense payload unless given"
    ] = None
    norm_bound: Annotated[float | None, positive, "norm that a longer upload is scaled to"] = None
    joining: Annotated[bool, "whether new clients may join once the run has begun"] = True
    keys: Annotated[
        str | None, "folder with CLIENT.pub for every client; unless given, a number is the first node's that claims it"
    ] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(int(n) for n in self.inputs.split("x"))

    @property
    def upload_bytes(self) -> int | None:
        """The most bytes of an upload."""
        return None if self.max_bytes is None else schema.in_bytes(self.max_bytes)

    def needed(self, cohort: int) -> int:
        """Return the number of uploads that a round with a cohort of this size needs."""
        return min(cohort, self.minimum or -(-cohort // 2))


@dataclass(frozen=True)
class Deployment:
    """A complete, checked request for a deployed federation."""

    recipe: Recipe
    options: FederationOptions

    def problem(self) -> Problem:
        """Return the learning problem, with the model on the device and in the precision asked for."""
        settings = self.recipe.settings
        module = models.build(self.recipe.model.name, self.options.shape, self.outputs, settings.seed)
        module = module.to(settings.torch_device(), settings.torch_dtype())
        loss, personal = settings.for_task(self.task).loss_function(), settings.steps_of_personal_phase()
        return Problem(module, loss, settings.weight_decay, settings.steps(), personal)

    def scorer(self) -> Scorer:
        """Return the scorer of evaluations."""
        settings = self.recipe.settings.for_task(self.task)
        return Scorer(self.task, settings.loss_function(), settings.metrics)

    @property
    def task(self) -> str:
        """The task of the federation."""
        return self.recipe.settings.task or "classification"

    @property
    def outputs(self) -> int:
        """The number of outputs of a model."""
        return outputs_for(self.task, self.options.classes)

    def require_sound(self) -> None:
        """Refuse a model or an optimizer that would fail on the SuperLink's machine."""
        require_optimizers(self.recipe.settings, self.recipe.algorithm)
        if self.recipe.model.name in models.MODELS:
            models.build(self.recipe.model.name, self.options.shape, self.outputs, seed=0)

    def to_toml(self) -> str:
        """Return the complete request as TOML, with defaults written out."""
        table = {k: v for k, v in dataclasses.asdict(self.options).items() if v is not None}
        lines = "".join(f"{key} = {recipe_text.toml_value(value)}\n" for key, value in table.items())
        return f"{self.recipe.to_toml()}\n[federation]\n{lines}"


def parse(table: dict[str, Any], as_recipe: Callable[[Mapping[str, Any]], Recipe] = recipes.parse) -> Deployment:
    """Return a deployment from its parsed TOML."""
    rest = {key: value for key, value in table.items() if key != "federation"}
    given = table.get("federation", {})
    if not isinstance(given, dict):
        raise FedslrError(f'federation: got {schema.show(given)}, expected a table such as {{ inputs = "3x32x32" }}')
    for key in ("inputs", "classes"):
        if key not in given:
            raise FedslrError(f"federation.{key} is missing: the server sees no data; add it to the table")
    return Deployment(as_recipe(rest), schema.build(FederationOptions, given, "federation"))


def from_text(text: str, changes: Sequence[str] = ()) -> Deployment:
    """Return a deployment from a recipe's text, with `key=value` changes applied."""
    return parse(recipes.apply(tomllib.loads(text), changes))


def demo(changes: Sequence[str] = ()) -> Deployment:
    """Return the demo's federation."""
    return from_text(files("fedslr.deploy").joinpath("demo.toml").read_text("utf-8"), changes)


def read(path: Path, changes: Sequence[str] = ()) -> Deployment:
    """Return a deployment from a recipe file with a table `federation`, with `key=value` changes applied."""
    return recipes.read_as(lambda table: parse(table, recipes.complete), path, changes)
