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


def gather_tile(rows: int, inner: int, outer: int, bytes: int) -> Tile:
    """Large tiles where there are enough of them to fill the card."""
    depth = min(128 // bytes, max(16, triton.next_power_of_2(inner)))
    if outer <= 64:
        return Tile(128, 64, depth, 4, 3)
    return Tile(128, 128, depth, _warps(bytes), 3) if rows >= 1024 else Tile(64, 128, depth, 4, 4)


def weight_tile(outer: int, inner: int, columns: int, bytes: int) -> Tile:
    depth = 128 // bytes
    if columns <= 64:
        return Tile(64, 64, depth, 4, 3)
    if outer <= 64:
        return Tile(64, 128, depth, 4, 3)
    return Tile(128, 64, depth, 4, 3) if inner <= 128 else Tile(128, 128, depth, _warps(bytes), 3)


def _warps(bytes: int) -> int:
    """For a large tile: the three products of a float32 number need registers."""
    return 4 if bytes == 2 else 8


GATHER = ["samples", "in_h", "in_w", "all_h", "all_w", "kernel_h", "kernel_w", "stride", "padding"]
WEIGHT = ["rows", "in_h", "in_w", "out_h", "out_w", "log_h", "log_w", "stride", "padding", "taps_h", "taps_w"]
WEIGHT += ["parts", "part_rows"]
"""Numbers that do not change how a kernel is compiled."""


@triton.jit(do_not_specialize=GATHER)
def _gather_product(
    x, w, y, samples, inner, outer, in_h, in_w, all_h, all_w, kernel_h, kernel_w, stride, padding,
    x_client, w_client, y_client, w_outer, w_inner, w_tap_h, w_tap_w,
    BACK: tl.constexpr, PRODUCT: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[row, o] = Σ_taps Σ_i x[pixel(row, tap), i] · w[tap, i, o], for every client.

    A row is a sample and an output pixel. BACK, for the gradient of a convolution with a stride: pixels of one parity
    get their gradient from the same taps, so that each parity is a product of its own. EVEN: tiles end where the
    channels do.
    """
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    if BACK:
        step = stride
        first_h = tl.program_id(2) // stride
        first_w = tl.program_id(2) % stride
        tap_h = (first_h + padding) % stride
        tap_w = (first_w + padding) % stride
        shift_h = (first_h + padding) // stride
        shift_w = (first_w + padding) // stride
        pixel_step = 1
        tap_step = -1
    else:
        step = 1
        first_h = 0
        first_w = 0
        tap_h = 0
        tap_w = 0
        shift_h = -padding
        shift_w = -padding
        pixel_step = stride
        tap_step = 1
    out_h = tl.maximum((all_h - first_h + step - 1) // step, 1)
    out_w = tl.maximum((all_w - first_w + step - 1) // step, 1)
    taps_h = (kernel_h - tap_h + step - 1) // step
    taps_w = (kernel_w - tap_w + step - 1) // step
    tiles_n = tl.cdiv(outer, BN)
    row = (pid // tiles_n) * BM + tl.arange(0, BM)
    col = (pid % tiles_n) * BN + tl.arange(0, BN)
    sample = (row // (out_h * out_w)).to(tl.int64)  # many large images have more numbers than 32 bits count
    h = (row // out_w) % out_h
    q = row % out_w
    real = (sample < samples) & (first_h < all_h) & (first_w < all_w)
    top = h * pixel_step + shift_h
    left = q * pixel_step + shift_w
    k = tl.arange(0, BK)
    from_x = x + client * x_client + (((sample * in_h + top) * in_w + left) * inner)[:, None] + k[None, :]
    from_w = w + client * w_client + tap_h * w_tap_h + tap_w * w_tap_w + col[None, :] * w_outer + k[:, None] * w_inner
    acc = tl.zeros((BM, BN), tl.float32)
    blocks = tl.cdiv(inner, BK)
    for i in range(taps_h * taps_w * blocks):
        tap = i // blocks
        deep = (i % blocks) * BK
        r = tap // taps_w
        s = tap % taps_w
        at_h = top + r * tap_step
        at_w = left + s * tap_step
        inside = (real & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w))[:, None]
        ahead = (r * in_w + s) * tap_step * inner + deep
        weights = from_w + (r * w_tap_h + s * w_tap_w) * step + deep * w_inner
        if EVEN:
            a = tl.load(from_x + ahead, mask=inside, other=0.0)
            b = tl.load(weights)
        else:
            left_over = k < inner - deep
            a = tl.load(from_x + ahead, mask=inside & left_over[None, :], other=0.0)
            b = tl.load(weights, mask=left_over[:, None] & (col < outer)[None, :], other=0.0)
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
    in_h, in_w, out_h, out_w, log_h, log_w, stride, padding, taps_h, taps_w, parts, part_rows,
    x_client, dy_client, dw_client, dw_part,
    PRODUCT: tl.constexpr, POWERS: tl.constexpr, ONE_TAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, i] = Σ_rows dy[row, o] · x[pixel(row, tap), i], for every client; the rows in several parts.

    A column is a tap and an input channel. POWERS: height and width are powers of two, of which the logarithms are
    given. ONE_TAP: all columns of a tile are of one tap.
    """
    columns = taps_h * taps_w * inner
    tiles_n = tl.cdiv(columns, BN)
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    o = (pid // tiles_n) * BM + tl.arange(0, BM)
    first = (pid % tiles_n) * BN
    col = first + tl.arange(0, BN)
    tap = first // inner if ONE_TAP else (col // inner)[None, :]
    r = tap // taps_w
    s = tap % taps_w
    at = (r * in_w + s) * inner + (col % inner)[None, :]
    begin = part * part_rows
    end = tl.minimum(begin + part_rows, rows)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(begin, end, BK):
        row = start + tl.arange(0, BK)[:, None]
        real = row < end
        if POWERS:
            sample = row >> (log_h + log_w)
            h = (row >> log_w) & (out_h - 1)
            q = row & (out_w - 1)
        else:
            sample = row // (out_h * out_w)
            h = (row // out_w) % out_h
            q = row % out_w
        top = h * stride - padding
        left = q * stride - padding
        inside = real & (top + r >= 0) & (top + r < in_h) & (left + s >= 0) & (left + s < in_w)
        g = tl.load(dy + client * dy_client + row * outer + o[None, :], mask=real & (o < outer)[None, :], other=0.0)
        a = tl.load(
            x + client * x_client + ((sample * in_h + top) * in_w + left) * inner + at,
            mask=inside & (col < columns)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRODUCT)
    tl.store(
        dw + part * dw_part + client * dw_client + o[:, None] * columns + col[None, :],
        acc,
        mask=(o < outer)[:, None] & (col < columns)[None, :],
    )


def forward(x: Tensor, w: Tensor, stride: int, padding: int, product: str = "tf32x3") -> Tensor:
    """x ∗ w: (clients, samples, H, W, i) and (clients, o, kh, kw, i) to (clients, samples, H', W', o)."""
    clients, samples, height, width, _ = x.shape
    _, outer, kh, kw, _ = w.shape
    out_h, out_w = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
    y = x.new_empty(clients, samples, out_h, out_w, outer)
    _gather(x, w, y, stride, padding, product, back=False)
    return y


def input_gradient(
    dy: Tensor, w: Tensor, height: int, width: int, stride: int, padding: int, product: str = "tf32x3"
) -> Tensor:
    """The gradient with respect to x."""
    dx = dy.new_empty(*dy.shape[:2], height, width, w.shape[4])
    _gather(dy, w, dx, stride, padding, product, back=True)
    return dx


def _gather(x: Tensor, w: Tensor, y: Tensor, stride: int, padding: int, product: str, back: bool) -> None:
    """Launch `_gather_product`; a convolution, or the way back through one."""
    clients, samples, in_h, in_w, inner = x.shape
    _, _, all_h, all_w, outer = y.shape
    step = stride if back else 1
    rows = samples * triton.cdiv(all_h, step) * triton.cdiv(all_w, step)
    tile = gather_tile(rows, inner, outer, x.element_size())
    along = (w.stride(4), w.stride(1)) if back else (w.stride(1), w.stride(4))
    _gather_product[(triton.cdiv(rows, tile.BM) * triton.cdiv(outer, tile.BN), clients, step * step)](
        x, w, y, samples, inner, outer, in_h, in_w, all_h, all_w, w.shape[2], w.shape[3], stride, padding,
        x.stride(0), w.stride(0), y.stride(0), *along, w.stride(2), w.stride(3),
        BACK=back, PRODUCT=product, EVEN=inner % tile.BK == 0 and outer % tile.BN == 0, **tile._asdict(),
    )  # fmt: skip


def weight_gradient(
    dy: Tensor, x: Tensor, kh: int, kw: int, stride: int, padding: int, product: str = "tf32x3"
) -> Tensor:
    """The gradient with respect to w, in float32."""
    clients, samples, out_h, out_w, outer = dy.shape
    inner = x.shape[4]
    rows = samples * out_h * out_w
    tile = weight_tile(outer, inner, kh * kw * inner, x.element_size())
    tiles = triton.cdiv(outer, tile.BM) * triton.cdiv(kh * kw * inner, tile.BN)
    parts = max(1, min(rows // 512, FILL // (tiles * clients)))
    part_rows = triton.cdiv(triton.cdiv(rows, parts), 128) * 128
    dw = torch.empty(parts, clients, outer, kh, kw, inner, device=x.device, dtype=torch.float32)
    _weight_product[(tiles, clients, parts)](
        x, dy, dw, rows, inner, outer,
        x.shape[2], x.shape[3], out_h, out_w, out_h.bit_length() - 1, out_w.bit_length() - 1,
        stride, padding, kh, kw, parts, part_rows,
        x.stride(0), dy.stride(0), dw.stride(1), dw.stride(0),
        PRODUCT=product, POWERS=out_h.bit_count() == out_w.bit_count() == 1, ONE_TAP=inner % tile.BN == 0,
        **tile._asdict(),
    )  # fmt: skip
    return dw[0] if parts == 1 else dw.sum(0)


# --- group norm, with what follows it --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["samples", "pixels", "groups"])
def _norm_forward(
    x, weight, bias, residual, y, mean, rstd, samples, pixels, channels, groups, width, eps,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, WHOLE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One sample's group: its mean and deviation, then the normalised, scaled, (added,) (rectified) values.

    WHOLE: all its pixels are one tile, which is read once.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    client = row // samples
    c = tl.arange(0, BC)
    p = tl.arange(0, BP)
    there = c < width
    here = row * pixels * channels + (group * width + c)[None, :] + p[:, None] * channels
    of_client = client * channels + group * width + c
    scale = tl.load(weight + of_client, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + of_client, mask=there, other=0.0).to(tl.float32)
    count = pixels * width
    if WHOLE:
        mask = (p < pixels)[:, None] & there[None, :]
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        m = tl.sum(v) / count
        d = tl.where(mask, v - m, 0.0)
        r = 1 / tl.sqrt(tl.sum(d * d) / count + eps)
        _norm_end(v * (scale * r)[None, :] + (shift - m * scale * r)[None, :], residual, y, here, mask, RESIDUAL, RELU)
    else:
        total = tl.zeros((BC,), tl.float32)
        square = tl.zeros((BC,), tl.float32)
        for start in range(0, pixels, BP):
            mask = ((start + p) < pixels)[:, None] & there[None, :]
            v = tl.load(x + here + start * channels, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(v, 0)
            square += tl.sum(v * v, 0)
        m = tl.sum(total, 0) / count
        r = 1 / tl.sqrt(tl.maximum(tl.sum(square, 0) / count - m * m, 0.0) + eps)
        for start in range(0, pixels, BP):
            mask = ((start + p) < pixels)[:, None] & there[None, :]
            at = here + start * channels
            v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            v = v * (scale * r)[None, :] + (shift - m * scale * r)[None, :]
            _norm_end(v, residual, y, at, mask, RESIDUAL, RELU)
    tl.store(mean + row * groups + group, m)
    tl.store(rstd + row * groups + group, r)


@triton.jit
def _norm_end(v, residual, y, at, mask, RESIDUAL: tl.constexpr, RELU: tl.constexpr):
    """Add the residual to normalised values, rectify them and store them."""
    if RESIDUAL:
        v += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        v = tl.maximum(v, 0.0)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["samples", "pixels", "groups"])
def _norm_backward(
    x, weight, bias, y, dy, mean, rstd, dx, dresidual, dweight, dbias, samples, pixels, channels, groups, width,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, WHOLE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradients of `_norm_forward`; those of scale and shift sample by sample."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    client = row // samples
    c = tl.arange(0, BC)
    p = tl.arange(0, BP)
    there = c < width
    here = row * pixels * channels + (group * width + c)[None, :] + p[:, None] * channels
    m = tl.load(mean + row * groups + group)
    r = tl.load(rstd + row * groups + group)
    of_client = client * channels + group * width + c
    scale = tl.load(weight + of_client, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + of_client, mask=there, other=0.0).to(tl.float32)
    by_scale = tl.zeros((BC,), tl.float32)
    by_shift = tl.zeros((BC,), tl.float32)
    count = pixels * width
    if WHOLE:
        mask = (p < pixels)[:, None] & there[None, :]
        g, v = _norm_begin(x, y, dy, here, mask, m, r, scale, shift, RESIDUAL, RELU)
        by_scale = tl.sum(g * v, 0)
        by_shift = tl.sum(g, 0)
        along = tl.sum(by_scale * scale, 0) / count
        level = tl.sum(by_shift * scale, 0) / count
        if RESIDUAL:
            tl.store(dresidual + here, g.to(dresidual.dtype.element_ty), mask=mask)
        d = (g * scale[None, :] - level - v * along) * r
        tl.store(dx + here, d.to(dx.dtype.element_ty), mask=mask)
    else:
        for start in range(0, pixels, BP):
            mask = ((start + p) < pixels)[:, None] & there[None, :]
            g, v = _norm_begin(x, y, dy, here + start * channels, mask, m, r, scale, shift, RESIDUAL, RELU)
            by_scale += tl.sum(g * v, 0)
            by_shift += tl.sum(g, 0)
        along = tl.sum(by_scale * scale, 0) / count
        level = tl.sum(by_shift * scale, 0) / count
        for start in range(0, pixels, BP):
            mask = ((start + p) < pixels)[:, None] & there[None, :]
            at = here + start * channels
            g, v = _norm_begin(x, y, dy, at, mask, m, r, scale, shift, RESIDUAL, RELU)
            if RESIDUAL:
                tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=mask)
            d = (g * scale[None, :] - level - v * along) * r
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    tl.store(dweight + row * channels + group * width + c, by_scale, mask=there)
    tl.store(dbias + row * channels + group * width + c, by_shift, mask=there)


@triton.jit
def _norm_begin(x, y, dy, at, mask, m, r, scale, shift, RESIDUAL: tl.constexpr, RELU: tl.constexpr):
    """The gradient where the ReLU let it through, and the normalised values."""
    g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    v = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - m) * r
    if RELU:
        out = v * scale[None, :] + shift[None, :]
        if RESIDUAL:
            out = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.where(out > 0, g, 0.0)
    return g, v


def _norm_tile(pixels: int, width: int, numbers: int, of_warp: int) -> dict[str, int | bool]:
    """All channels of a group, and so many of its pixels that a tile has no more than some numbers, if it can be."""
    channels = triton.next_power_of_2(width)
    whole = triton.next_power_of_2(pixels)
    held = min(whole, max(1, numbers // channels))
    warps = max(1, min(16, held * channels // of_warp))
    return {"WHOLE": held == whole, "BC": channels, "BP": held, "num_warps": warps}


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
        RESIDUAL=residual is not None, RELU=relu, **_norm_tile(height * width, each, 32768, 2048),
    )  # fmt: skip
    return y, mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor | None, mean: Tensor, rstd: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients with respect to x, scale and shift of every sample, and residual.

    y is what came out, where there was a residual.
    """
    clients, samples, height, width, channels = x.shape
    groups = mean.shape[1]
    each = channels // groups
    dx = torch.empty_like(x)
    dresidual = None if y is None else torch.empty_like(x)
    by_sample = torch.empty(2, clients, samples, channels, device=x.device, dtype=torch.float32)
    _norm_backward[(clients * samples, groups)](
        x, weight, bias, x if y is None else y, dy, mean, rstd, dx, dx if dresidual is None else dresidual, *by_sample,
        samples, height * width, channels, groups, each,
        RESIDUAL=y is not None, RELU=relu, **_norm_tile(height * width, each, 4096, 1024),
    )  # fmt: skip
    return dx, by_sample, dresidual
