"""The layers of many clients at once: every parameter and activation has a leading axis of clients."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MATRIX_UNIT_WIDTH = 16
"""Channels that the matrix units take at a time."""


@functools.cache
def has_triton() -> bool:
    """Return whether kernels can be compiled: PyTorch installs Triton where it supports it."""
    return importlib.util.find_spec("triton") is not None


def _has_kernel(x: Tensor) -> bool:
    """On a GPU, in single or half precision; elsewhere PyTorch's own layers are called, client by client."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32) and has_triton()


class SideStream:
    """A second stream, for gradients of weights: nothing waits for them until the backward pass is over.

    They are products, which keep the matrix units busy, while the norms on the way back keep the memory busy.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._used: list[Any] = []

    def run(self, work: Callable[[], Tensor], *used: Tensor) -> Tensor:
        """Run work on the side stream; keep its inputs alive until `join`."""
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
        """Wait for all work of the side stream."""
        for device in {used[0].device for used in self._used}:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._used.clear()


side_stream = SideStream()


class _Conv(torch.autograd.Function):
    """A convolution whose weights are rounded to the activations' type, and their gradient is not.

    The gradient of weights that are `free`, no function of others, is computed on the side stream.
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

            dw = (side_stream.run(by_weight, dy, x) if ctx.free else by_weight()).permute(0, 1, 4, 2, 3)
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
        dw, db = side_stream.run(lambda: by_sample.sum(2), by_sample)
        return dx, dw, db, dr, None, None, None


def convolve(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int, product: str) -> Tensor:
    if _has_kernel(x):
        narrow = w.shape[2] < MATRIX_UNIT_WIDTH
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
    fill = -x.shape[-1] % MATRIX_UNIT_WIDTH
    return F.pad(x, (0, fill)), F.pad(w, (0, fill))[..., None, None]


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
) -> Tensor:
    if _has_kernel(x):
        fused: Tensor = _Norm.apply(x, weight, bias, residual, groups, eps, relu)
        return fused
    each = F.group_norm(x.flatten(0, 1).movedim(-1, 1), groups, eps=eps).movedim(1, -1).unflatten(0, x.shape[:2])
    y = each * weight[:, None, None, None, :] + bias[:, None, None, None, :]
    y = (y if residual is None else y + residual).to(x.dtype)
    return torch.relu(y) if relu else y


def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.bmm(x.to(w.dtype), w.mT)
    return y if bias is None else y + bias[:, None, :]


def flatten(x: Tensor) -> Tensor:
    """As the model's own flattening orders it: channels first."""
    return x.movedim(-1, 2).flatten(2) if x.ndim == 5 else x.flatten(2)


def max_pool(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    images = x.flatten(0, 1).movedim(-1, 1)
    pooled: Tensor = F.max_pool2d(images, *args, **kwargs)
    pooled = pooled.movedim(1, -1).reshape(*x.shape[:2], *pooled.shape[2:], pooled.shape[1])
    return pooled


def channels_last(x: Tensor, rounded: bool) -> Tensor:
    """Inputs as activations: (clients, samples, H, W, channels), in half precision if that is wanted."""
    if x.ndim == 5:
        x = x.movedim(2, -1)
    return x.to(torch.bfloat16).contiguous() if rounded else x.contiguous()
