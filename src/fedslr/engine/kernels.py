"""Convolutions of many clients at once, each with weights of its own: implicit matrix products in Triton.

A cohort's activations are (clients, samples, height, width, channels) and its weights (clients, outputs, kernel height,
kernel width, inputs), both dense in that order. A convolution is then one matrix product per client, whose rows are
output pixels and whose columns are output channels; the patches are gathered while they are multiplied, never stored.
Products are of the inputs' type and are summed in float32. The matrix units multiply float32 numbers as TF32, of which
three products ("tf32x3") keep nearly all digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FILL = 528
"""Programs that keep a large card busy: a sum with fewer is cut into parts."""


class Tile(NamedTuple):
    """How a product is cut for the processors: rows, columns and depth of a tile, warps on it, loads ahead."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


def gather_tile(rows: int, outer: int, depth: int) -> Tile:
    """Large tiles where there are enough of them to fill the card."""
    if outer <= 64:
        return Tile(128, 64, depth, 4, 3)
    return Tile(128, 128, depth, 8, 3) if rows >= 1024 else Tile(64, 128, depth, 4, 4)


def weight_tile(outer: int, inner: int, depth: int) -> Tile:
    return Tile(64, 64, depth, 4, 3) if outer <= 64 or inner <= 64 else Tile(128, 128, depth, 8, 3)


def _depth(x: Tensor) -> int:
    """So many numbers that their tiles fit into a processor's own memory."""
    return 128 // x.element_size()


GATHER = ["rows", "in_h", "in_w", "out_h", "out_w", "all_h", "all_w", "stride", "shift_h", "shift_w", "step"]
GATHER += ["tap0_h", "tap0_w", "taps_h", "taps_w", "tap_step", "first_h", "first_w"]
WEIGHT = ["rows", "in_h", "in_w", "out_h", "out_w", "stride", "padding", "taps_h", "taps_w", "parts", "part_rows"]
"""Numbers that do not change how a kernel is compiled."""


@triton.jit(do_not_specialize=GATHER)
def _gather_product(
    x, w, y, rows, inner, outer,
    in_h, in_w, out_h, out_w, all_h, all_w,
    stride, shift_h, shift_w, step, tap0_h, tap0_w, taps_h, taps_w, tap_step, first_h, first_w,
    x_client, w_client, y_client, w_outer, w_inner, w_tap_h, w_tap_w,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[row, o] = Σ_taps Σ_i x[pixel(row, tap), i] · w[tap, i, o], for every client.

    A row is a sample and an output pixel; output pixels are first + step·(0, 1, …), so that the gradient of a strided
    convolution can be computed for one parity of pixels at a time. The input pixel of a tap is
    stride·pixel_index + shift ± tap index.
    """
    tiles_n = tl.cdiv(outer, BN)
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    row = (pid // tiles_n) * BM + tl.arange(0, BM)
    col = (pid % tiles_n) * BN + tl.arange(0, BN)
    sample = row // (out_h * out_w)
    h = (row // out_w) % out_h
    q = row % out_w
    real = row < rows
    base = x + client * x_client
    weights = w + client * w_client + col[None, :] * w_outer
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    blocks = tl.cdiv(inner, BK)
    for i in range(taps_h * taps_w * blocks):
        tap = i // blocks
        kk = (i % blocks) * BK + k
        r = tap // taps_w
        s = tap % taps_w
        at_h = h * stride + shift_h + r * tap_step
        at_w = q * stride + shift_w + s * tap_step
        inside = real & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
        pixels = ((sample * in_h + at_h) * in_w + at_w) * inner
        a = tl.load(base + pixels[:, None] + kk[None, :], mask=inside[:, None] & (kk < inner)[None, :], other=0.0)
        tap_at = (tap0_h + r * step) * w_tap_h + (tap0_w + s * step) * w_tap_w
        b = tl.load(
            weights + tap_at + kk[:, None] * w_inner, mask=(kk < inner)[:, None] & (col < outer)[None, :], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision=PRODUCT)
    to = ((sample * all_h + h * step + first_h) * all_w + q * step + first_w) * outer
    tl.store(
        y + client * y_client + to[:, None] + col[None, :],
        acc.to(y.dtype.element_ty),
        mask=real[:, None] & (col < outer)[None, :],
    )


@triton.jit(do_not_specialize=WEIGHT)
def _weight_product(
    x, dy, dw, rows, inner, outer,
    in_h, in_w, out_h, out_w, stride, padding, taps_h, taps_w, parts, part_rows,
    x_client, dy_client, dw_client, dw_part,
    PRODUCT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, i] = Σ_rows dy[row, o] · x[pixel(row, tap), i], for every client; the rows in several parts."""
    tiles_n = tl.cdiv(inner, BN)
    tiles_m = tl.cdiv(outer, BM)
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    tap = pid // (tiles_m * tiles_n)
    tile = pid % (tiles_m * tiles_n)
    o = (tile // tiles_n) * BM + tl.arange(0, BM)
    i = (tile % tiles_n) * BN + tl.arange(0, BN)
    r = tap // taps_w
    s = tap % taps_w
    begin = part * part_rows
    end = tl.minimum(begin + part_rows, rows)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(begin, end, BK):
        row = start + tl.arange(0, BK)
        real = row < end
        sample = row // (out_h * out_w)
        at_h = ((row // out_w) % out_h) * stride + r - padding
        at_w = (row % out_w) * stride + s - padding
        inside = real & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
        pixels = ((sample * in_h + at_h) * in_w + at_w) * inner
        g = tl.load(
            dy + client * dy_client + row[:, None] * outer + o[None, :],
            mask=real[:, None] & (o < outer)[None, :], other=0.0,
        )  # fmt: skip
        a = tl.load(
            x + client * x_client + pixels[:, None] + i[None, :], mask=inside[:, None] & (i < inner)[None, :], other=0.0
        )
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRODUCT)
    to = o[:, None] * (taps_h * taps_w * inner) + tap * inner + i[None, :]
    tl.store(dw + part * dw_part + client * dw_client + to, acc, mask=(o < outer)[:, None] & (i < inner)[None, :])


def _gather(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    pixels: tuple[int, int],
    taps: tuple[int, ...],
    along: tuple[int, int],
    product: str,
) -> None:
    """Launch `_gather_product` for some pixels of y; `along` are the strides of w's outer and inner channels."""
    clients, samples, in_h, in_w, inner = x.shape
    _, _, all_h, all_w, outer = y.shape
    rows = samples * pixels[0] * pixels[1]
    tile = gather_tile(rows, outer, _depth(x))
    _gather_product[(triton.cdiv(rows, tile.BM) * triton.cdiv(outer, tile.BN), clients)](
        x, w, y, rows, inner, outer,
        in_h, in_w, *pixels, all_h, all_w, *taps,
        x.stride(0), w.stride(0), y.stride(0), *along, w.stride(2), w.stride(3),
        PRODUCT=product, **tile._asdict(),
    )  # fmt: skip


def forward(x: Tensor, w: Tensor, stride: int, padding: int, product: str = "tf32x3") -> Tensor:
    """x ∗ w: (clients, samples, H, W, i) and (clients, o, kh, kw, i) to (clients, samples, H', W', o)."""
    clients, samples, height, width, _ = x.shape
    _, outer, kh, kw, _ = w.shape
    out_h, out_w = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
    y = x.new_empty(clients, samples, out_h, out_w, outer)
    taps = (stride, -padding, -padding, 1, 0, 0, kh, kw, 1, 0, 0)
    _gather(x, w, y, (out_h, out_w), taps, (w.stride(1), w.stride(4)), product)
    return y


def input_gradient(
    dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, product: str = "tf32x3"
) -> Tensor:
    """The gradient with respect to x; one launch for every parity of pixels."""
    clients, samples = dy.shape[:2]
    _, _, kh, kw, inner = w.shape
    dx = dy.new_empty(clients, samples, height, width, inner)
    for first_h in range(min(stride, height)):
        for first_w in range(min(stride, width)):
            part_h, part_w = -(-(height - first_h) // stride), -(-(width - first_w) // stride)
            tap_h, tap_w = (first_h + padding) % stride, (first_w + padding) % stride
            taps_h, taps_w = max(0, -(-(kh - tap_h) // stride)), max(0, -(-(kw - tap_w) // stride))
            taps = (
                1, (first_h + padding - tap_h) // stride, (first_w + padding - tap_w) // stride, stride,
                tap_h, tap_w, taps_h, taps_w, -1, first_h, first_w,
            )  # fmt: skip
            _gather(dy, w, dx, (part_h, part_w), taps, (w.stride(4), w.stride(1)), product)
    return dx


def weight_gradient(
    dy: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, product: str = "tf32x3"
) -> Tensor:
    """The gradient with respect to w, in float32."""
    clients, samples, out_h, out_w, outer = dy.shape
    inner = x.shape[4]
    rows = samples * out_h * out_w
    tile = weight_tile(outer, inner, _depth(x))
    tiles = kh * kw * triton.cdiv(outer, tile.BM) * triton.cdiv(inner, tile.BN)
    parts = max(1, min(rows // 512, FILL // (tiles * clients)))
    part_rows = triton.cdiv(triton.cdiv(rows, parts), 128) * 128
    dw = torch.empty(parts, clients, outer, kh, kw, inner, device=x.device, dtype=torch.float32)
    _weight_product[(tiles, clients, parts)](
        x, dy, dw, rows, inner, outer,
        x.shape[2], x.shape[3], out_h, out_w, stride, padding, kh, kw, parts, part_rows,
        x.stride(0), dy.stride(0), dw.stride(1), dw.stride(0),
        PRODUCT=product, **tile._asdict(),
    )  # fmt: skip
    return dw[0] if parts == 1 else dw.sum(0)


# --- group norm, with what follows it --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["samples", "pixels", "groups"])
def _norm_forward(
    x, weight, bias, residual, y, mean, rstd, samples, pixels, channels, groups, width, eps,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One sample's group: its mean and deviation, then the normalised, scaled, (added,) (rectified) values."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    client = row // samples
    c = tl.arange(0, BC)
    there = c < width
    at = row * pixels * channels + group * width + c
    total = tl.zeros((BC,), tl.float32)
    square = tl.zeros((BC,), tl.float32)
    p = tl.arange(0, BP)
    for start in range(0, pixels, BP):
        mask = ((start + p) < pixels)[:, None] & there[None, :]
        v = tl.load(x + at[None, :] + (start + p)[:, None] * channels, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(v, 0)
        square += tl.sum(v * v, 0)
    count = pixels * width
    m = tl.sum(total, 0) / count
    r = 1 / tl.sqrt(tl.maximum(tl.sum(square, 0) / count - m * m, 0.0) + eps)
    tl.store(mean + row * groups + group, m)
    tl.store(rstd + row * groups + group, r)
    of_client = client * channels + group * width + c
    scale = tl.load(weight + of_client, mask=there, other=0.0).to(tl.float32) * r
    shift = tl.load(bias + of_client, mask=there, other=0.0).to(tl.float32) - m * scale
    for start in range(0, pixels, BP):
        mask = ((start + p) < pixels)[:, None] & there[None, :]
        here = at[None, :] + (start + p)[:, None] * channels
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if RESIDUAL:
            v += tl.load(residual + here, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            v = tl.maximum(v, 0.0)
        tl.store(y + here, v.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["samples", "pixels", "groups"])
def _norm_backward(
    x, weight, bias, y, dy, mean, rstd, dx, dresidual, dweight, dbias, samples, pixels, channels, groups, width,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients of `_norm_forward`; those of scale and shift sample by sample."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    client = row // samples
    c = tl.arange(0, BC)
    there = c < width
    at = row * pixels * channels + group * width + c
    m = tl.load(mean + row * groups + group)
    r = tl.load(rstd + row * groups + group)
    of_client = client * channels + group * width + c
    scale = tl.load(weight + of_client, mask=there, other=0.0).to(tl.float32)
    steep = scale * r
    shift = tl.load(bias + of_client, mask=there, other=0.0).to(tl.float32) - m * steep
    by_scale = tl.zeros((BC,), tl.float32)
    by_shift = tl.zeros((BC,), tl.float32)
    p = tl.arange(0, BP)
    for start in range(0, pixels, BP):
        mask = ((start + p) < pixels)[:, None] & there[None, :]
        here = at[None, :] + (start + p)[:, None] * channels
        g = tl.load(dy + here, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            if RESIDUAL:
                g = tl.where(tl.load(y + here, mask=mask, other=0.0).to(tl.float32) > 0, g, 0.0)
            else:
                g = tl.where(v * steep[None, :] + shift[None, :] > 0, g, 0.0)
        v = (v - m) * r
        by_scale += tl.sum(g * v, 0)
        by_shift += tl.sum(g, 0)
    tl.store(dweight + row * channels + group * width + c, by_scale, mask=there)
    tl.store(dbias + row * channels + group * width + c, by_shift, mask=there)
    count = pixels * width
    along = tl.sum(by_scale * scale, 0) / count
    level = tl.sum(by_shift * scale, 0) / count
    for start in range(0, pixels, BP):
        mask = ((start + p) < pixels)[:, None] & there[None, :]
        here = at[None, :] + (start + p)[:, None] * channels
        g = tl.load(dy + here, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            if RESIDUAL:
                g = tl.where(tl.load(y + here, mask=mask, other=0.0).to(tl.float32) > 0, g, 0.0)
            else:
                g = tl.where(v * steep[None, :] + shift[None, :] > 0, g, 0.0)
        v = (v - m) * r
        if RESIDUAL:
            tl.store(dresidual + here, g.to(dresidual.dtype.element_ty), mask=mask)
        d = (g * scale[None, :] - level - v * along) * r
        tl.store(dx + here, d.to(dx.dtype.element_ty), mask=mask)


def _norm_tile(width: int) -> dict[str, int]:
    """All channels of a group, and pixels to make 8192 numbers."""
    channels = triton.next_power_of_2(width)
    return {"BC": channels, "BP": max(1, 8192 // channels), "num_warps": 8}


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """relu(norm(x) + residual) of (clients, samples, H, W, channels), and every group's mean and 1/deviation."""
    clients, samples, height, width, channels = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(clients * samples, groups, device=x.device, dtype=torch.float32) for _ in range(2))
    each = channels // groups
    _norm_forward[(clients * samples, groups)](
        x, weight, bias, x if residual is None else residual, y, mean, rstd,
        samples, height * width, channels, groups, each, eps,
        RESIDUAL=residual is not None, RELU=relu, **_norm_tile(each),
    )  # fmt: skip
    return y, mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor | None, mean: Tensor, rstd: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients with respect to x, scale, shift and residual; y is what came out, where there was a residual."""
    clients, samples, height, width, channels = x.shape
    groups = mean.shape[1]
    each = channels // groups
    dx = torch.empty_like(x)
    dresidual = None if y is None else torch.empty_like(x)
    by_sample = torch.empty(2, clients, samples, channels, device=x.device, dtype=torch.float32)
    _norm_backward[(clients * samples, groups)](
        x, weight, bias, x if y is None else y, dy, mean, rstd, dx, dx if dresidual is None else dresidual, *by_sample,
        samples, height * width, channels, groups, each,
        RESIDUAL=y is not None, RELU=relu, **_norm_tile(each),
    )  # fmt: skip
    dweight, dbias = by_sample.sum(2)
    return dx, dweight, dbias, dresidual
