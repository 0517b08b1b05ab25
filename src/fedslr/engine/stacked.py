"""A model of many clients at once: every parameter has a leading axis of clients, every client its own batch.

`stack` rewrites a model's graph layer by layer. Activations are (clients, samples, height, width, channels), so that
what a convolution gathers lies together; group norm, the residual it is added to and the ReLU after it are one kernel.
Models made of other layers than the ones here are not rewritten (`stack` gives None); engines then vectorize them with
`torch.vmap`.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedslr.core.types import Params

Network = Callable[[Params, Tensor], Tensor]
"""Stacked parameters and inputs (clients, samples, channels, height, width) to outputs (clients, samples, classes)."""


# --- layers ----------------------------------------------------------------------------------------------------------

WIDE = 16
"""Channels that the matrix units take at a time."""


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled; PyTorch brings Triton along where it supports it."""
    return importlib.util.find_spec("triton") is not None


def _has_kernel(x: Tensor) -> bool:
    """On a GPU, in single or half precision; elsewhere PyTorch's own layers are called, client by client."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and has_triton()


class _Aside:
    """A second stream, for gradients of weights: nothing waits for them until the backward pass is over.

    They are products, which keep the matrix units busy, while the norms on the way back keep the memory busy.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._used: list[Any] = []

    def run(self, work: Callable[[], Tensor], *used: Tensor) -> Tensor:
        """Do some work aside; what it reads is kept until the streams have come together again."""
        device = used[0].device
        if device.type != "cuda":
            return work()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        self._used.append(used)
        with torch.cuda.stream(stream):
            return work()

    def join(self) -> None:
        """From here on, everything done aside is done."""
        for device in {used[0].device for used in self._used}:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._used.clear()


aside = _Aside()


class _Conv(torch.autograd.Function):
    """A convolution whose weights are rounded to the activations' type, and their gradient is not.

    The gradient of weights that are `free`, no function of others, is computed aside.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: int, padding: int, product: str, free: bool) -> Tensor:
        from fedslr.engine import kernels

        x, rounded = x.contiguous(), w.to(x.dtype).permute(0, 1, 3, 4, 2).contiguous()
        ctx.save_for_backward(x, rounded)
        ctx.how, ctx.free = (stride, padding, product), free
        return kernels.forward(x, rounded, stride, padding, product)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        from fedslr.engine import kernels

        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[1]:

            def by_weight() -> Tensor:
                return kernels.weight_gradient(dy, x, w.shape[2], w.shape[3], *ctx.how)

            dw = (aside.run(by_weight, dy, x) if ctx.free else by_weight()).permute(0, 1, 4, 2, 3)
        if ctx.needs_input_grad[0]:
            dx = kernels.input_gradient(dy, w, x.shape[2], x.shape[3], *ctx.how)
        return dx, dw, None, None, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
    ) -> Tensor:
        from fedslr.engine import kernels

        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, mean, rstd = kernels.norm_forward(x, weight, bias, residual, groups, eps, relu)
        ctx.save_for_backward(x, weight, bias, None if residual is None else y, mean, rstd)
        ctx.relu = relu
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        from fedslr.engine import kernels

        x, weight, bias, y, mean, rstd = ctx.saved_tensors
        dx, by_sample, dr = kernels.norm_backward(dy.contiguous(), x, weight, bias, y, mean, rstd, ctx.relu)
        dw, db = aside.run(lambda: by_sample.sum(2), by_sample)
        return dx, dw, db, dr, None, None, None


def _conv(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, product: str) -> Tensor:
    if _has_kernel(x):
        narrow = w.shape[2] < WIDE
        if narrow:
            x, w, stride, padding = *_as_pixels(x, w, stride, padding), 1, 0
        y: Tensor = _Conv.apply(x, w, stride, padding, product, not narrow)
    else:
        w = w.to(x.dtype)
        each = [F.conv2d(a.movedim(-1, 1), b, stride=stride, padding=padding) for a, b in zip(x, w, strict=True)]
        y = torch.stack([a.movedim(1, -1) for a in each])
    return y if bias is None else y + bias.to(y.dtype)[:, None, None, None, :]


def _as_pixels(x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """A convolution of few channels as one of single pixels that hold a whole patch each."""
    kh, kw = w.shape[3:]
    x = F.pad(x, (0, 0, padding, padding, padding, padding)).unfold(2, kh, stride).unfold(3, kw, stride)
    x = x.permute(0, 1, 2, 3, 5, 6, 4).flatten(4)
    w = w.permute(0, 1, 3, 4, 2).flatten(2)
    fill = -x.shape[-1] % WIDE
    return F.pad(x, (0, fill)), F.pad(w, (0, fill))[..., None, None]


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
) -> Tensor:
    if _has_kernel(x):
        fused: Tensor = _Norm.apply(x, weight, bias, residual, groups, eps, relu)
        return fused
    each = F.group_norm(x.flatten(0, 1).movedim(-1, 1), groups, eps=eps).movedim(1, -1).unflatten(0, x.shape[:2])
    y = each * weight[:, None, None, None, :] + bias[:, None, None, None, :]
    y = (y if residual is None else y + residual).to(x.dtype)
    return torch.relu(y) if relu else y


def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.bmm(x.to(w.dtype), w.mT)
    return y if bias is None else y + bias[:, None, :]


def _flatten(x: Tensor) -> Tensor:
    """As the model's own flattening orders it: channels first."""
    return x.movedim(-1, 2).flatten(2) if x.ndim == 5 else x.flatten(2)


def _max_pool(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    images = x.flatten(0, 1).movedim(-1, 1)
    pooled: Tensor = F.max_pool2d(images, *args, **kwargs)
    pooled = pooled.movedim(1, -1).reshape(*x.shape[:2], *pooled.shape[2:], pooled.shape[1])
    return pooled


# --- rewriting -------------------------------------------------------------------------------------------------------


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
            return self.graph.call_function(_channels_last, (x, self.rounded))
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
            return self.graph.call_function(_flatten, (first,))
        if what is F.max_pool2d:
            return self.graph.call_function(_max_pool, (first, *node.args[1:]), dict(node.kwargs))
        raise _Unknown

    def _layer(self, node: fx.Node, name: str, layer: nn.Module, x: Any) -> fx.Node | None:
        if type(layer) in ELEMENTWISE:
            return self.graph.call_function(ELEMENTWISE[type(layer)], (x,))
        if isinstance(layer, nn.Flatten) and layer.start_dim == 1 and layer.end_dim == -1:
            return self.graph.call_function(_flatten, (x,))
        if isinstance(layer, nn.Linear):
            return self.graph.call_function(
                _linear, (x, self._param(name, "weight", layer), self._param(name, "bias", layer))
            )
        if isinstance(layer, nn.Conv2d):
            plain = layer.groups == 1 and _pair(layer.dilation) == 1 and layer.padding_mode == "zeros"
            if not plain or isinstance(layer.padding, str):
                raise _Unknown
            parts = (self._param(name, "weight", layer), self._param(name, "bias", layer))
            how = (_pair(layer.stride), _pair(layer.padding), self.product)
            return self.graph.call_function(_conv, (x, *parts, *how))
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
        made = self.graph.call_function(_norm, (x, *parts, residual, layer.num_groups, layer.eps, relu))
        if last is not node:
            if residual is not None and follower is not None:
                self.made[follower] = made
            self.made[last] = made
        return made

    @staticmethod
    def _only_user(node: fx.Node) -> fx.Node | None:
        return next(iter(node.users)) if len(node.users) == 1 else None


def _channels_last(x: Tensor, rounded: bool) -> Tensor:
    """Inputs as activations: (clients, samples, H, W, channels), in half precision if that is wanted."""
    if x.ndim == 5:
        x = x.movedim(2, -1)
    return x.to(torch.bfloat16).contiguous() if rounded else x.contiguous()


def stack(model: nn.Module, rounded: bool, product: str = "tf32x3") -> Network | None:
    """The model for stacked parameters; None if it has a layer without a rule here.

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
def is_same(network: Network, model: nn.Module, x: Tensor) -> bool:
    """Whether a stacked model, not rounded, says of some inputs what the model says: rules cannot foresee every use."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    try:
        said = network({k: torch.stack([p, 1.1 * p]) for k, p in params.items()}, x.expand(2, *x.shape))
    except Exception:  # a probe: whatever is wrong with it, another engine will say it better
        return False
    each = [torch.func.functional_call(model, {k: s * p for k, p in params.items()}, (x,)) for s in (1.0, 1.1)]
    wanted = torch.stack(each)
    return said.shape == wanted.shape and bool((said - wanted).norm() <= 1e-2 * wanted.norm())
