"""The forms of a layer (dense, factors, factors and a sparse product), and the choice of the smallest and fastest."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedslr.export.factored_layers import FactoredLayer, PlainLayer, RecomposedLayer, SparseAddition, is_plain
from fedslr.export.layered_model import Forms, Layer, LayeredModel, slender
from fedslr.export.runtimes import Runtime, milliseconds

MEASUREMENTS = 9
MAX_FIRST_SLOWDOWN = 3
"""A form that is this much slower than dense in one measurement is not measured again."""
MAX_RELATIVE_TIME = 0.97
"""A form must take less than this share of dense's time, so that noise does not replace a plain layer."""


def convertible(model: nn.Module) -> dict[str, PlainLayer]:
    """Return the layers that can take another form, by the names of their weights; shared weights stay dense."""
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return {
        f"{name}.weight": cast(PlainLayer, module)
        for name, module in model.named_modules()
        if name and is_plain(module) and users[id(module.weight)] == 1
    }


def in_form(form: str, plain: PlainLayer, layer: Layer) -> nn.Module:
    """Return a layer in another form; every form computes the same function."""
    if form == "factors" and layer.factors is not None:
        return FactoredLayer(plain, layer.factors)
    if form == "sparse" and layer.rest is not None:
        low = layer.low or slender(torch.zeros_like(layer.whole))
        return SparseAddition(FactoredLayer(plain, low), plain, layer.rest)
    return RecomposedLayer(plain, layer.low, layer.rest)


def alternatives(plain: PlainLayer, layer: Layer, sparse: bool = True) -> list[str]:
    """Return the forms that a layer can take besides dense."""
    found = ["factors"] if layer.factors is not None else []
    return [*found, "sparse"] if sparse and layer.is_sparse and SparseAddition.takes(plain) else found


def in_forms(model: nn.Module, layers: Mapping[str, Layer], forms: Forms) -> nn.Module:
    """Return a copy of a model whose layers have the given forms, ready to run."""
    made = copy.deepcopy(model)
    for name, plain in convertible(made).items():
        if name in forms:
            made.set_submodule(name.removesuffix(".weight"), in_form(forms[name], plain, layers[name]))
    return made.eval().requires_grad_(False)


def uniform(source: LayeredModel, form: str) -> Forms:
    """Give this form to every layer that can take it; the others stay dense."""
    return {
        name: form
        for name, plain in convertible(source.model).items()
        if name in source.layers and form in alternatives(plain, source.layers[name])
    }


def smallest(source: LayeredModel) -> Forms:
    """Return factors wherever they have fewer entries than the matrix."""
    return uniform(source, "factors")


def smallest_program(source: LayeredModel) -> Forms:
    """Return the forms that take the fewest bytes in a program, which stores the tensors that it runs."""
    costs = {name: source.layers[name].bytes_by_form() for name in convertible(source.model) if name in source.layers}
    return _without_dense({name: min(by_form, key=by_form.__getitem__) for name, by_form in costs.items()})


def _without_dense(forms: Forms) -> Forms:
    return {name: form for name, form in forms.items() if form != "dense"}


def fastest(source: LayeredModel, runtime: Runtime) -> Forms:
    """Return the form of every layer that takes the least time for the model's batch on this machine.

    The layers are measured one by one. The whole model is then measured against the dense and the smallest one, because
    the operations between layers count too.
    """
    whole = in_forms(source.model, source.layers, {})
    inputs = _layer_inputs(whole, source.x)
    best = {
        name: _fastest_form(plain, source.layers[name], inputs[name], runtime)
        for name, plain in convertible(whole).items()
        if name in source.layers and name in inputs
    }
    plans = {"dense": {}, "fastest layers": _without_dense(best), "smallest": smallest(source)}
    return plans[_fastest_name(plan_times(source, plans, runtime, MEASUREMENTS))]


def _fastest_form(plain: PlainLayer, layer: Layer, x: Tensor, runtime: Runtime) -> str:
    others = {form: in_form(form, plain, layer) for form in alternatives(plain, layer, runtime.sparse)}
    if not others:
        return "dense"
    calls = {form: runtime.ready(made, x) for form, made in {"dense": plain, **others}.items()}
    first = milliseconds(calls, 1)
    promising = {form: call for form, call in calls.items() if first[form] <= MAX_FIRST_SLOWDOWN * first["dense"]}
    return _fastest_name(milliseconds(promising, MEASUREMENTS))


def plan_times(source: LayeredModel, plans: Mapping[str, Forms], runtime: Runtime, repeat: int) -> dict[str, float]:
    """Return the milliseconds of a model in each of several plans; equal plans are measured once."""
    same = {name: next(other for other in plans if plans[other] == plan) for name, plan in plans.items()}
    calls = {
        name: runtime.ready(in_forms(source.model, source.layers, plans[name]), source.x)
        for name in dict.fromkeys(same.values())
    }
    took = milliseconds(calls, repeat)
    return {name: took[other] for name, other in same.items()}


def _fastest_name(took: Mapping[str, float]) -> str:
    """Return the name of the shortest time, or "dense" if that takes about as long."""
    best = min(took, key=took.__getitem__)
    return best if took[best] < MAX_RELATIVE_TIME * took["dense"] else "dense"


def _layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the input of every convertible layer when the model sees a batch."""
    seen: dict[nn.Module, Tensor] = {}

    def watch(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen.setdefault(module, given[0])

    plains = convertible(model)
    hooks = [plain.register_forward_pre_hook(watch) for plain in plains.values()]
    model(x)
    for hook in hooks:
        hook.remove()
    return {name: seen[plain] for name, plain in plains.items() if plain in seen}
