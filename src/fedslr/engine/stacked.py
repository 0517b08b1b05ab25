"""A model of many clients at once: every parameter has a leading axis of clients, every client its own batch.

`stack_model` rewrites a model's graph layer by layer. Activations are (clients, samples, height, width, channels), so
that the values a convolution gathers are adjacent. Group norm, the residual added to it and the ReLU after it are one
kernel. `stack_model` returns None for a model with other layers; engines then vectorize it with `torch.vmap`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedslr.core.types import Params
from fedslr.engine import stacked_layers as layers

Network = Callable[[Params, Tensor], Tensor]
"""Stacked parameters and inputs (clients, samples, channels, height, width) to outputs (clients, samples, classes)."""


class _Unknown(Exception):
    """A layer that has no rule here."""


ELEMENTWISE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu,
    nn.Tanh: torch.tanh,
    nn.Sigmoid: torch.sigmoid,
    nn.SiLU: F.silu,
}
RELUS = (F.relu, torch.relu, nn.ReLU, "relu")
ADDS = (operator.add, torch.add, "add")


def _what(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    """A node's function, the type of its module, or the name of its method."""
    return type(modules[str(node.target)]) if node.op == "call_module" else node.target


def _pair(value: Any) -> int:
    """The one number of a square pair."""
    if isinstance(value, int):
        return value
    if isinstance(value, tuple) and len(set(value)) == 1:
        return int(value[0])
    raise _Unknown


def _trace(model: nn.Module) -> fx.GraphModule:
    """A model's graph, if it does the same in training as in use."""
    was = model.training
    try:
        in_use, in_training = (fx.symbolic_trace(model.train(mode)) for mode in (False, True))
    finally:
        model.train(was)
    if in_use.code != in_training.code:
        raise _Unknown
    return in_use


class _Rewriter:
    """Walks a traced model and writes the graph of its stacked form."""

    def __init__(self, model: nn.Module, rounded: bool, product: str) -> None:
        self.traced = _trace(model)
        self.modules = dict(self.traced.named_modules())
        for node in list(self.traced.graph.nodes):
            if node.op == "call_module" and isinstance(self.modules[str(node.target)], nn.Identity):
                node.replace_all_uses_with(node.args[0])
                self.traced.graph.erase_node(node)
        self.rounded, self.product = rounded, product
        self.graph = fx.Graph()
        self.params = self.graph.placeholder("params")
        self.made: dict[fx.Node, fx.Node | None] = {}
        self.unused = {name for name, _ in model.named_parameters()}

    def write(self) -> fx.Graph:
        for node in self.traced.graph.nodes:
            if node not in self.made:
                self.made[node] = self._node(node)
        return self.graph

    def _new(self, node: Any) -> Any:
        return self.made[node] if isinstance(node, fx.Node) else node

    def _param(self, layer: str, name: str, module: nn.Module) -> fx.Node | None:
        parameter = getattr(module, name)
        if parameter is None:
            return None
        if not parameter.requires_grad:
            raise _Unknown  # what does not train is not among the parameters that are given
        whole = f"{layer}.{name}"
        if whole not in self.unused:
            raise _Unknown  # weights of two layers: their gradients, computed aside, would have to be added up
        self.unused.remove(whole)
        return self.graph.call_function(operator.getitem, (self.params, whole))

    def _node(self, node: fx.Node) -> fx.Node | None:
        if node.op == "placeholder":
            if any(other.op == "placeholder" for other in self.made):
                raise _Unknown
            x = self.graph.placeholder("x")
            return self.graph.call_function(layers.channels_last, (x, self.rounded))
        if node.op == "output":
            end: fx.Node = self.graph.output(self._new(node.args[0]))
            return end
        what = _what(node, self.modules)
        first = self._new(node.args[0]) if node.args else None
        if what is not F.max_pool2d and any(given is not False for given in node.kwargs.values()):
            raise _Unknown
        if node.op == "call_module":
            return self._layer(node, str(node.target), self.modules[str(node.target)], first)
        if what in RELUS:
            return self.graph.call_function(torch.relu, (first,))
        if what in ADDS and all(isinstance(a, fx.Node) for a in node.args) and len(node.args) == 2:
            return self.graph.call_function(torch.add, (first, self._new(node.args[1])))
        if what in ("mean", torch.mean) and node.args[1:] in (((2, 3),), ((-2, -1),)) and not node.kwargs:
            return self.graph.call_function(torch.mean, (first, (2, 3)))
        if what in ("flatten", torch.flatten) and node.args[1:] == (1,) and not node.kwargs:
            return self.graph.call_function(layers.flatten, (first,))
        if what is F.max_pool2d:
            return self.graph.call_function(layers.max_pool, (first, *node.args[1:]), dict(node.kwargs))
        raise _Unknown

    def _layer(self, node: fx.Node, name: str, layer: nn.Module, x: Any) -> fx.Node | None:
        if type(layer) in ELEMENTWISE:
            return self.graph.call_function(ELEMENTWISE[type(layer)], (x,))
        if isinstance(layer, nn.Flatten) and layer.start_dim == 1 and layer.end_dim == -1:
            return self.graph.call_function(layers.flatten, (x,))
        if isinstance(layer, nn.Linear):
            return self.graph.call_function(
                layers.multiply, (x, self._param(name, "weight", layer), self._param(name, "bias", layer))
            )
        if isinstance(layer, nn.Conv2d):
            plain = layer.groups == 1 and _pair(layer.dilation) == 1 and layer.padding_mode == "zeros"
            if not plain or isinstance(layer.padding, str):
                raise _Unknown
            parts = (self._param(name, "weight", layer), self._param(name, "bias", layer))
            how = (_pair(layer.stride), _pair(layer.padding), self.product)
            return self.graph.call_function(layers.convolve, (x, *parts, *how))
        if isinstance(layer, nn.GroupNorm) and layer.affine:
            return self._normalize(node, name, layer, x)
        raise _Unknown

    def _normalize(self, node: fx.Node, name: str, layer: nn.GroupNorm, x: Any) -> fx.Node | None:
        """Group norm, with the sum and the ReLU that nobody else looks behind."""
        last, residual, relu = node, None, False
        follower = self._only_user(node)
        if follower is not None and _what(follower, self.modules) in ADDS:
            other = next((a for a in follower.args if a is not node), None)
            if isinstance(other, fx.Node) and other in self.made:
                after = self._only_user(follower)
                if after is not None and _what(after, self.modules) in RELUS:
                    last, residual, relu = after, self.made[other], True
        elif follower is not None and _what(follower, self.modules) in RELUS:
            last, relu = follower, True
        parts = (self._param(name, "weight", layer), self._param(name, "bias", layer))
        made = self.graph.call_function(layers.normalize, (x, *parts, residual, layer.num_groups, layer.eps, relu))
        if last is not node:
            if residual is not None and follower is not None:
                self.made[follower] = made
            self.made[last] = made
        return made

    @staticmethod
    def _only_user(node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None


def stack_model(model: nn.Module, rounded: bool, product: str = "tf32x3") -> Network | None:
    """Return the model for stacked parameters; None if it has a layer without a rule here.

    `rounded` models keep activations in bfloat16; sums, norms and gradients of weights are in float32. `product` says
    how a GPU multiplies float32 numbers, see `kernels`.
    """
    try:
        graph = _Rewriter(model, rounded, product).write()
        graph.lint()
        return fx.GraphModule(nn.Module(), graph)
    except Exception:  # people write models in more ways than tracing foresees, and none of them is a mistake
        return None


@torch.no_grad()
def gives_same_outputs(network: Network, model: nn.Module, x: Tensor) -> bool:
    """Return whether a stacked model, not rounded, gives the model's outputs: the rules cannot foresee every model."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    try:
        said = network({k: torch.stack([p, 1.1 * p]) for k, p in params.items()}, x.expand(2, *x.shape))
    except Exception:  # a probe: whatever is wrong with it, another engine will say it better
        return False
    each = [torch.func.functional_call(model, {k: s * p for k, p in params.items()}, (x,)) for s in (1.0, 1.1)]
    wanted = torch.stack(each)
    return said.shape == wanted.shape and bool((said - wanted).norm() <= 1e-2 * wanted.norm())
