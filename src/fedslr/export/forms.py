"""In which form a layer runs: dense, as factors, or as factors and a sparse product; the smallest or the fastest."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedslr.core.errors import FedslrError
from fedslr.core.matrix import LowRank, matrix_shape
from fedslr.export.factored_layers import Added, Plain, Recomposed, Thin, is_plain
from fedslr.export.parts import Layer
from fedslr.export.timing import Runtime, milliseconds

Forms = dict[str, str]
"""The form of every layer that is not dense, by the name of its weight: factors, sparse or recomposed."""

REPEAT = 9
HOPELESS = 3
"""A form that takes so many times as long as dense at first sight is not looked at again."""
MARGIN = 0.97
"""A form must take less than this share of dense's time: a coin toss is no reason to leave the plain layer."""
STEPS = 2048
"""Bytes that a program takes, about, to say how a weight is put together."""


def convertible(model: nn.Module) -> dict[str, Plain]:
    """The layers that can take another form, by the names of their weights. A shared weight stays as it is."""
    users: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            users[id(p)] = users.get(id(p), 0) + 1
    return {
        f"{name}.weight": cast(Plain, module)
        for name, module in model.named_modules()
        if name and is_plain(module) and users[id(module.weight)] == 1
    }


def in_form(form: str, plain: Plain, layer: Layer) -> nn.Module:
    """A layer in another form."""
    if form == "factors" and layer.factors is not None:
        return Thin(plain, layer.factors)
    if form == "sparse" and layer.rest is not None:
        return Added(Thin(plain, layer.low or _nothing(layer.whole)), plain, layer.rest)
    if form == "recomposed":
        return Recomposed(plain, layer.low, layer.rest)
    raise FedslrError(f"a layer of shape {list(layer.whole.shape)} has no form '{form}'")


def _nothing(like: Tensor) -> LowRank:
    """Factors of rank 0."""
    rows, columns = matrix_shape(tuple(like.shape))
    return LowRank(like.new_zeros(rows, 0), like.new_zeros(columns, 0), tuple(like.shape))


def alternatives(plain: Plain, layer: Layer, sparse: bool = True) -> list[str]:
    """The forms a layer can take besides dense."""
    found = ["factors"] if layer.factors is not None else []
    return [*found, "sparse"] if sparse and layer.is_sparse and Added.takes(plain) else found


def shaped(model: nn.Module, layers: Mapping[str, Layer], forms: Forms) -> nn.Module:
    """A copy of a model whose layers have the given forms, ready to be run."""
    made = copy.deepcopy(model).eval().requires_grad_(False)
    for name, plain in convertible(made).items():
        if name in forms:
            made.set_submodule(name.removesuffix(".weight"), in_form(forms[name], plain, layers[name]))
    return made.requires_grad_(False)


def uniform(model: nn.Module, layers: Mapping[str, Layer], form: str) -> Forms:
    """Every layer that has this form in it, the others dense."""
    found = {name: alternatives(plain, layers[name]) for name, plain in convertible(model).items() if name in layers}
    return {name: form for name, forms in found.items() if form in forms}


def smallest(model: nn.Module, layers: Mapping[str, Layer]) -> Forms:
    """Factors wherever they hold fewer numbers than the matrix."""
    return uniform(model, layers, "factors")


def smallest_program(model: nn.Module, layers: Mapping[str, Layer]) -> Forms:
    """The forms that take the fewest bytes in a program, which stores what it runs."""
    found: Forms = {}
    for name in convertible(model):
        costs = layers[name].bytes_by_form() if name in layers else {"dense": 0}
        form = min(costs, key=lambda form: costs[form] + (STEPS if form == "recomposed" else 0))
        if form != "dense":
            found[name] = form
    return found


def fastest(model: nn.Module, layers: Mapping[str, Layer], x: Tensor, runtime: Runtime, repeat: int = REPEAT) -> Forms:
    """The form of every layer that takes least time for this batch, on this machine.

    Layers are measured one by one, then the model as a whole against the dense one and the one that is smallest, since
    what stands between layers counts too.
    """
    whole = shaped(model, layers, {})
    seen = _inputs(whole, x)
    best = {
        name: _fastest_form(plain, layers[name], seen[name], runtime, repeat)
        for name, plain in convertible(whole).items()
        if name in layers and name in seen
    }
    found = {name: form for name, form in best.items() if form != "dense"}
    return _fastest_plan([{}, found, smallest(model, layers)], model, layers, x, runtime, repeat)


def _fastest_form(plain: Plain, layer: Layer, x: Tensor, runtime: Runtime, repeat: int) -> str:
    others = {form: in_form(form, plain, layer) for form in alternatives(plain, layer, runtime.sparse)}
    if not others:
        return "dense"
    calls = {form: runtime.ready(made, x) for form, made in {"dense": plain, **others}.items()}
    glance = milliseconds(calls, 1)
    promising = {form: call for form, call in calls.items() if glance[form] <= HOPELESS * glance["dense"]}
    return _cheapest(milliseconds(promising, repeat), "dense")


def _fastest_plan(
    plans: list[Forms], model: nn.Module, layers: Mapping[str, Layer], x: Tensor, runtime: Runtime, repeat: int
) -> Forms:
    different = {repr(sorted(plan.items())): plan for plan in plans}
    if len(different) == 1:
        return plans[0]
    calls = {name: runtime.ready(shaped(model, layers, plan), x) for name, plan in different.items()}
    return different[_cheapest(milliseconds(calls, repeat), repr([]))]


def _cheapest(took: Mapping[str, float], dense: str) -> str:
    best = min(took, key=lambda name: took[name])
    return best if took[best] < MARGIN * took[dense] else dense


def _inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What every convertible layer is given when the model sees a batch."""
    seen: dict[str, Tensor] = {}

    def watch(name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.setdefault(name, given[0].detach())

    plains = convertible(model).items()
    hooks = [plain.register_forward_pre_hook(functools.partial(watch, name)) for name, plain in plains]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
