"""Convolutions of many models at once on a GPU, as matrix products over all clients in one kernel.

Libraries run a grouped convolution group by group, so 20 clients are 20 small kernels one after another. Here a program
computes a tile of one client's outputs. Images are matrices `[rows, clients · channels]`, a row for each image, line
and column; dilation is one. r runs over taps and channels, channels fastest.

    out[k, m, o] = Σ_r x[k, m + tap(r), c(r)] w[k, o, r]
    dx             the same with dy for x and the weights turned round: `[C, taps, O]`
    dw[k, o, r]  = Σ_m dy[k, m, o] x[k, m + tap(r), c(r)]

Factors are bfloat16, or float32 that are rounded to TF32 before they are stored: tensor cores would truncate the last
13 bits, which doubles the error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_OF_A_TILE = 128
_ENOUGH_PROGRAMS = 1024  # so many keep all multiprocessors of a large GPU busy


class Shape(NamedTuple):
    """A stacked convolution without its weights."""

    clients: int
    batch: int
    inputs: int
    outputs: int
    height: int
    width: int
    size: tuple[int, int]
    """Height and width of the output."""
    kernel: tuple[int, int]
    pad: tuple[int, int]
    stride: int = 1
    up: int = 1
    """Distance between pixels of the input, with zeros between them: for the gradient of a convolution with a
    stride."""

    @property
    def rows(self) -> int:
        return self.batch * self.size[0] * self.size[1]

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    def turned(self) -> Shape:
        """The convolution that gives the gradient of the input from that of the output."""
        around = (self.kernel[0] - 1 - self.pad[0], self.kernel[1] - 1 - self.pad[1])
        image = (self.height, self.width)
        return Shape(
            self.clients, self.batch, self.outputs, self.inputs, *self.size, image, self.kernel, around, 1, self.stride
        )


def shape_of(x: tuple[int, ...], weight: tuple[int, ...], pad: tuple[int, int], stride: int = 1) -> Shape:
    """From the shapes `[batch, clients · C, height, width]` and `[clients, O, C, height, width]`."""
    (batch, _, height, width), (clients, outputs, inputs, *kernel) = x, weight
    size = (height + 2 * pad[0] - kernel[0]) // stride + 1, (width + 2 * pad[1] - kernel[1]) // stride + 1
    return Shape(clients, batch, inputs, outputs, height, width, size, (kernel[0], kernel[1]), pad, stride)


@triton.jit
def rounded(x):
    """To the nearest TF32 number; NaN stays NaN."""
    nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)


@triton.jit
def _convolve(
    x, weight, out, means, squares, rows, wide, out_wide,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    C: tl.constexpr, OUTPUTS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, STRIDE: tl.constexpr, UP: tl.constexpr,
    BACK: tl.constexpr, STATISTICS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`weight: [clients, O, taps, C]`; with BACK it is that of the other direction, `[clients, C, taps, O]`, whose taps
    are taken from the last to the first. With STATISTICS each tile's mean and sum of squared deviations of each
    channel are stored, `[tiles, clients · O]`."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    column, row, image = m % OUT_WIDTH, (m // OUT_WIDTH) % OUT_HEIGHT, m // (OUT_WIDTH * OUT_HEIGHT)
    column, row = column * STRIDE, row * STRIDE
    known = m < rows
    base = x + client * C
    own = weight + client * (OUTPUTS * KH * KW * C)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, KH * KW * C, BK):
        r = start + tl.arange(0, BK)
        if C % BK == 0:  # one tap in a tile
            tap = start // C
            c = tl.max_contiguous(tl.multiple_of(start % C + tl.arange(0, BK), BK), BK)
            i, j = row + tap // KW - PAD_H, column + tap % KW - PAD_W
            there = known
            if UP > 1:
                there = known & (i % UP == 0) & (j % UP == 0)
                i, j = i // UP, j // UP
            inside = (there & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH))[:, None]
            place = base + (((image * HEIGHT + i) * WIDTH + j).to(tl.int64) * wide)[:, None] + c[None, :]
        else:
            tap, c = r // C, r % C
            i, j = row[:, None] + (tap // KW - PAD_H)[None, :], column[:, None] + (tap % KW - PAD_W)[None, :]
            there = known[:, None] & (r < KH * KW * C)[None, :]
            if UP > 1:
                there = there & (i % UP == 0) & (j % UP == 0)
                i, j = i // UP, j // UP
            inside = there & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH)
            place = base + ((image[:, None] * HEIGHT + i) * WIDTH + j).to(tl.int64) * wide + c[None, :]
        a = tl.load(place, mask=inside, other=0.0)
        if BACK:
            here = own + (c * (KH * KW) + KH * KW - 1 - tap) * OUTPUTS
            mask = (n < OUTPUTS)[None, :]
            if (KH * KW * C) % BK != 0:
                mask = mask & (r < KH * KW * C)[:, None]
            b = tl.load(here[:, None] + n[None, :], mask=mask, other=0.0)
            total = tl.dot(a, b, total, input_precision="tf32")
        else:
            mask = (n < OUTPUTS)[:, None]
            if (KH * KW * C) % BK != 0:
                mask = mask & (r < KH * KW * C)[None, :]
            b = tl.load(own + n[:, None] * (KH * KW * C) + r[None, :], mask=mask, other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="tf32")
    place = out + m.to(tl.int64)[:, None] * out_wide + client * OUTPUTS + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=known[:, None] & (n < OUTPUTS)[None, :])
    if STATISTICS:
        count = tl.minimum(BM, rows - tl.program_id(0) * BM)
        mean = tl.sum(total, axis=0) / count  # rows beyond the last are 0
        apart = tl.where(known[:, None], total - mean[None, :], 0.0)
        place = tl.program_id(0).to(tl.int64) * out_wide + client * OUTPUTS + n
        tl.store(means + place, mean, mask=n < OUTPUTS)
        tl.store(squares + place, tl.sum(apart * apart, axis=0), mask=n < OUTPUTS)


@triton.jit
def _weigh(
    x, slope, out, rows, inputs, clients, SHARE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    C: tl.constexpr, OUTPUTS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, STRIDE: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out[share, client, o, r]: the sum over one share of the rows. With BY_CHANNEL `x: [clients · C, rows]` and
    `slope: [clients · O, rows]`, otherwise both as in `_convolve`."""
    tiles: tl.constexpr = (KH * KW * C + BR - 1) // BR
    n = (tl.program_id(0) // tiles) * BN + tl.arange(0, BN)
    first = (tl.program_id(0) % tiles) * BR
    r = first + tl.arange(0, BR)
    part = tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    tap, c = r // C, r % C
    total = tl.zeros((BN, BR), tl.float32)
    for start in range(0, SHARE, BM):
        m = part * SHARE + start + tl.arange(0, BM)
        column, row, image = m % OUT_WIDTH, (m // OUT_WIDTH) % OUT_HEIGHT, m // (OUT_WIDTH * OUT_HEIGHT)
        column, row = column * STRIDE, row * STRIDE
        known = m < rows
        if C % BR == 0:
            only = first // C
            i, j = row + only // KW - PAD_H, column + only % KW - PAD_W
            inside = (known & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH))[:, None]
            pixel = ((image * HEIGHT + i) * WIDTH + j)[:, None]
            channel = tl.max_contiguous(tl.multiple_of(first % C + tl.arange(0, BR), BR), BR)[None, :]
        else:
            i, j = row[:, None] + (tap // KW - PAD_H)[None, :], column[:, None] + (tap % KW - PAD_W)[None, :]
            inside = known[:, None] & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH) & (r < KH * KW * C)[None, :]
            pixel = (image[:, None] * HEIGHT + i) * WIDTH + j
            channel = c[None, :]
        if BY_CHANNEL:
            a = tl.load(
                slope + (client * OUTPUTS + n)[:, None] * rows + m[None, :],
                mask=(n < OUTPUTS)[:, None] & known[None, :],
                other=0.0,
            )
            b = tl.load(
                x + tl.trans((client * C + channel) * inputs + pixel), mask=tl.trans(inside & (channel < C)), other=0.0
            )
            total = tl.dot(a, tl.trans(b), total, input_precision="tf32")
        else:
            a = tl.load(
                slope + m.to(tl.int64)[:, None] * (clients * OUTPUTS) + client * OUTPUTS + n[None, :],
                mask=known[:, None] & (n < OUTPUTS)[None, :],
                other=0.0,
            )
            b = tl.load(x + client * C + pixel.to(tl.int64) * (clients * C) + channel, mask=inside, other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision="tf32")
    place = out + ((part * clients + client) * OUTPUTS + n)[:, None] * (KH * KW * C) + r[None, :]
    tl.store(place, total, mask=(n < OUTPUTS)[:, None] & (r < KH * KW * C)[None, :])


@triton.jit
def _swap(
    source, out, source_stride, out_stride, pairs, C,
    TAPS: tl.constexpr, FORTH: tl.constexpr, ROUND: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Of each client `[O, C, taps]` → `[O, taps, C]`, or back."""
    client = tl.program_id(1).to(tl.int64)
    q, tap = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, BT)
    by_pair = q[:, None] * TAPS + tap[None, :]
    by_tap = ((q // C)[None, :] * TAPS + tap[:, None]) * C + (q % C)[None, :]
    pair_mask = (q < pairs)[:, None] & (tap < TAPS)[None, :]
    tap_mask = (q < pairs)[None, :] & (tap < TAPS)[:, None]
    if FORTH:
        tile = tl.load(source + client * source_stride + by_pair, mask=pair_mask, other=0.0)
        if ROUND:
            tile = rounded(tile)
        tl.store(out + client * out_stride + by_tap, tl.trans(tile).to(out.dtype.element_ty), mask=tap_mask)
    else:
        tile = tl.load(source + client * source_stride + by_tap, mask=tap_mask, other=0.0)
        tl.store(out + client * out_stride + by_pair, tl.trans(tile), mask=pair_mask)


@triton.jit
def _turn(
    source, out, source_stride, OUTPUTS, size, TAPS: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Of each client `[O, C, taps]` → `[C, taps, O]`, rounded, with the taps from the last to the first; `size` is C ·
    taps."""
    client = tl.program_id(2).to(tl.int64)
    o, r = tl.program_id(1) * BO + tl.arange(0, BO), tl.program_id(0) * BR + tl.arange(0, BR)
    mask = (o < OUTPUTS)[:, None] & (r < size)[None, :]
    tile = rounded(tl.load(source + client * source_stride + o[:, None] * size + r[None, :], mask=mask, other=0.0))
    to = (r // TAPS) * TAPS + TAPS - 1 - r % TAPS
    mask = (r < size)[:, None] & (o < OUTPUTS)[None, :]
    tl.store(out + (client * size + to[:, None]) * OUTPUTS + o[None, :], tl.trans(tile), mask=mask)


@triton.jit
def _prepare(
    x, out, turned, rows, wide, COPY: tl.constexpr, TURN: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Round to TF32: with COPY in the same layout, with TURN transposed."""
    p, c = tl.program_id(0) * BP + tl.arange(0, BP), tl.program_id(1) * BC + tl.arange(0, BC)
    mask = (p < rows)[:, None] & (c < wide)[None, :]
    place = p.to(tl.int64)[:, None] * wide + c[None, :]
    tile = rounded(tl.load(x + place, mask=mask, other=0.0))
    if COPY:
        tl.store(out + place, tile, mask=mask)
    if TURN:
        place = turned + c.to(tl.int64)[:, None] * rows + p[None, :]
        tl.store(place, tl.trans(tile), mask=(c < wide)[:, None] & (p < rows)[None, :])


def prepared(x: Tensor, kind: torch.dtype, turn: bool, copy: bool = True) -> tuple[Tensor, Tensor]:
    """`x: [rows, channels]` for products in `kind` and, with `turn`, the same as `[channels, rows]` (otherwise the
    first tensor again). Without `copy` the numbers of `x` are rounded already, and the first tensor is `x`."""
    if kind != torch.float32:
        out = x.to(kind)
        return out, out
    (rows, wide), out = x.shape, torch.empty_like(x) if copy else x
    turned = torch.empty(wide, rows, device=x.device) if turn else out
    grid = (triton.cdiv(rows, 64), triton.cdiv(wide, 32))
    _prepare[grid](x, out, turned, rows, wide, copy, turn, BP=64, BC=32, num_warps=4)
    return out, turned


def _tile(size: int, most: int) -> int:
    return max(16, min(most, int(triton.next_power_of_2(size))))


def convolved(
    x: Tensor, weight: Tensor, shape: Shape, kind: torch.dtype, back: bool = False, statistics: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output `[rows, clients · O]` of `x: [rows, clients · C]` and, with `statistics`, those of the tiles."""
    wide = shape.clients * shape.outputs
    out = torch.empty(shape.rows, wide, device=x.device, dtype=kind)
    wide_tile, deep = _tile(shape.outputs, 256), _tile(shape.taps * shape.inputs, 64 if x.itemsize == 2 else 32)
    used = {"BM": ROWS_OF_A_TILE, "BN": wide_tile, "BK": deep}
    used |= {"num_warps": 8 if wide_tile >= 128 else 4, "num_stages": 4 if wide_tile >= 64 else 3}
    tiles = triton.cdiv(shape.rows, ROWS_OF_A_TILE)
    means, squares = (torch.empty(tiles, wide, device=x.device) for _ in range(2)) if statistics else (out, out)
    _convolve[(tiles, triton.cdiv(shape.outputs, wide_tile), shape.clients)](
        x, weight, out, means, squares, shape.rows, x.shape[1], wide, shape.height, shape.width, *shape.size,
        shape.inputs, shape.outputs, *shape.kernel, *shape.pad, shape.stride, shape.up, back, statistics, **used,
    )  # fmt: skip
    return (out, means, squares) if statistics else (out, None, None)


def weighed(x: Tensor, slope: Tensor, shape: Shape, by_channel: bool) -> Tensor:
    """The gradient of the weights as sums over shares of the rows, `[shares, clients, O, taps · C]`."""
    size = shape.taps * shape.inputs
    used = {"BM": 64 if x.itemsize == 2 else 32, "BN": _tile(shape.outputs, 128), "BR": _tile(size, 256)}
    used |= {"num_warps": 8 if used["BN"] * used["BR"] >= 128 * 128 else 4, "num_stages": 3}
    tiles = triton.cdiv(shape.outputs, used["BN"]) * triton.cdiv(size, used["BR"])
    # If there are few weights, shares of the rows are summed first and then added up, in a fixed order.
    shares = max(1, min(_ENOUGH_PROGRAMS // (tiles * shape.clients), shape.rows // 512))
    share = triton.cdiv(triton.cdiv(shape.rows, shares), used["BM"]) * used["BM"]
    shares = triton.cdiv(shape.rows, share)
    out = torch.empty(shares, shape.clients, shape.outputs, size, device=x.device)
    _weigh[(tiles, shares, shape.clients)](
        x, slope, out, shape.rows, shape.batch * shape.height * shape.width, shape.clients, share,
        shape.height, shape.width, *shape.size, shape.inputs, shape.outputs,
        *shape.kernel, *shape.pad, shape.stride, by_channel, **used,
    )  # fmt: skip
    return out


def turned_weights(weight: Tensor, kind: torch.dtype, both: bool) -> tuple[Tensor, Tensor]:
    """`[clients, O, C, height, width]` → `[clients, O, taps, C]` and `[clients, C, taps, O]` (or the first again), for
    products in `kind`; only the first axis of `weight` may have a stride of its own."""
    clients, outputs, inputs = weight.shape[:3]
    taps = weight.shape[3] * weight.shape[4]
    out = torch.empty(clients, outputs, taps, inputs, device=weight.device, dtype=kind)
    back = torch.empty(clients, inputs, taps, outputs, device=weight.device, dtype=kind) if both else out
    _swapped(weight, out, weight.shape, forth=True)
    if both:
        size, tile = inputs * taps, {"BO": 64, "BR": 64, "num_warps": 4}
        grid = (triton.cdiv(size, tile["BR"]), triton.cdiv(outputs, tile["BO"]), clients)
        _turn[grid](weight, back, weight.stride(0), outputs, size, taps, **tile)
    return out, back


def turn_back(shares: Tensor, out: Tensor) -> None:
    """Add the shares of a gradient, `[shares, clients, O, taps · C]`, up into `out: [clients, O, C, height, width]`."""
    _swapped(shares[0] if len(shares) == 1 else shares.sum(dim=0), out, out.shape, forth=False)


def _swapped(source: Tensor, out: Tensor, shape: torch.Size, forth: bool) -> None:
    clients, outputs, inputs, *kernel = shape
    taps, pairs = kernel[0] * kernel[1], outputs * inputs
    tile = {"BQ": 256, "BT": int(triton.next_power_of_2(taps)), "num_warps": 4}
    flags = forth, forth and out.dtype == torch.float32
    _swap[(triton.cdiv(pairs, tile["BQ"]), clients)](
        source, out, source.stride(0), out.stride(0), pairs, inputs, taps, *flags, **tile
    )
