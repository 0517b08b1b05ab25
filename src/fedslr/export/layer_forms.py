"""The forms in which a layer runs (dense, factors, factors and a sparse product), and the smallest and fastest."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedslr.core.matrix import LowRank, matrix_shape
from fedslr.export.factored_layers import FactoredLayer, PlainLayer, RecomposedLayer, SparseAddition, is_plain
from fedslr.export.layer_parts import Layer
from fedslr.export.runtimes import Runtime, milliseconds

Forms = dict[str, str]
"""The form of every layer that is not dense, by the name of its weight: factors, sparse or recomposed."""

MEASUREMENTS = 9
MAX_FIRST_SLOWDOWN = 3
"""A form that is this much slower than dense in one measurement is not measured again."""
MAX_RELATIVE_TIME = 0.97
"""A form must take less than this share of dense's time, so that noise does not replace a plain layer."""
RECOMPOSITION_BYTES = 2048
"""Approximate size of the operations that put a weight together in a program."""


def convertible(model: nn.Module) -> dict[str, PlainLayer]:
    """Return the layers that can take another form, by the names of their weights; shared weights stay dense."""
    users: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            users[id(p)] = users.get(id(p), 0) + 1
    return {
        f"{name}.weight": cast(PlainLayer, module)
        for name, module in model.named_modules()
        if name and is_plain(module) and users[id(module.weight)] == 1
    }


def in_form(form: str, plain: PlainLayer, layer: Layer) -> nn.Module:
    """Return a layer in another form; every form computes the same."""
    if form == "factors" and layer.factors is not None:
        return FactoredLayer(plain, layer.factors)
    if form == "sparse" and layer.rest is not None:
        low = layer.low or _rank_zero(layer.whole)
        return SparseAddition(FactoredLayer(plain, low), plain, layer.rest)
    return RecomposedLayer(plain, layer.low, layer.rest)


def _rank_zero(like: Tensor) -> LowRank:
    rows, columns = matrix_shape(tuple(like.shape))
    return LowRank(like.new_zeros(rows, 0), like.new_zeros(columns, 0), tuple(like.shape))


def alternatives(plain: PlainLayer, layer: Layer, sparse: bool = True) -> list[str]:
    """Return the forms a layer can take besides dense."""
    found = ["factors"] if layer.factors is not None else []
    return [*found, "sparse"] if sparse and layer.is_sparse and SparseAddition.takes(plain) else found


def in_forms(model: nn.Module, layers: Mapping[str, Layer], forms: Forms) -> nn.Module:
    """Return a copy of a model whose layers have the given forms, ready to run."""
    made = copy.deepcopy(model).eval().requires_grad_(False)
    for name, plain in convertible(made).items():
        if name in forms:
            made.set_submodule(name.removesuffix(".weight"), in_form(forms[name], plain, layers[name]))
    return made.requires_grad_(False)


def uniform(model: nn.Module, layers: Mapping[str, Layer], form: str) -> Forms:
    """Give this form to every layer that can take it; the others stay dense."""
    found = {name: alternatives(plain, layers[name]) for name, plain in convertible(model).items() if name in layers}
    return {name: form for name, forms in found.items() if form in forms}


def smallest(model: nn.Module, layers: Mapping[str, Layer]) -> Forms:
    """Return factors wherever they hold fewer numbers than the matrix."""
    return uniform(model, layers, "factors")


def smallest_program(model: nn.Module, layers: Mapping[str, Layer]) -> Forms:
    """Return the forms that take the fewest bytes in a program, which stores the tensors that it runs."""
    found: Forms = {}
    for name in convertible(model):
        costs = layers[name].bytes_by_form() if name in layers else {"dense": 0}
        form = min(costs, key=lambda form: costs[form] + (RECOMPOSITION_BYTES if form == "recomposed" else 0))
        if form != "dense":
            found[name] = form
    return found


def fastest(
    model: nn.Module, layers: Mapping[str, Layer], x: Tensor, runtime: Runtime, repeat: int = MEASUREMENTS
) -> Forms:
    """Return the form of every layer that takes least time for this batch on this machine.

    Layers are measured one by one, then the whole model against the dense and the smallest one, because the operations
    between layers count too.
    """
    whole = in_forms(model, layers, {})
    seen = _layer_inputs(whole, x)
    best = {
        name: _fastest_form(plain, layers[name], seen[name], runtime, repeat)
        for name, plain in convertible(whole).items()
        if name in layers and name in seen
    }
    found = {name: form for name, form in best.items() if form != "dense"}
    return _fastest_plan([{}, found, smallest(model, layers)], model, layers, x, runtime, repeat)


def _fastest_form(plain: PlainLayer, layer: Layer, x: Tensor, runtime: Runtime, repeat: int) -> str:
    others = {form: in_form(form, plain, layer) for form in alternatives(plain, layer, runtime.sparse)}
    if not others:
        return "dense"
    calls = {form: runtime.ready(made, x) for form, made in {"dense": plain, **others}.items()}
    glance = milliseconds(calls, 1)
    promising = {form: call for form, call in calls.items() if glance[form] <= MAX_FIRST_SLOWDOWN * glance["dense"]}
    return _cheapest(milliseconds(promising, repeat), "dense")


def _fastest_plan(
    plans: list[Forms], model: nn.Module, layers: Mapping[str, Layer], x: Tensor, runtime: Runtime, repeat: int
) -> Forms:
    different = {repr(sorted(plan.items())): plan for plan in plans}
    if len(different) == 1:
        return plans[0]
    calls = {name: runtime.ready(in_forms(model, layers, plan), x) for name, plan in different.items()}
    return different[_cheapest(milliseconds(calls, repeat), repr([]))]


def _cheapest(took: Mapping[str, float], dense: str) -> str:
    best = min(took, key=lambda name: took[name])
    return best if took[best] < MAX_RELATIVE_TIME * took[dense] else dense


def _layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the input of every convertible layer when the model sees a batch."""
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
