"""Convolutions of many models at once on a GPU, as matrix products over all clients in one kernel.

Libraries run a grouped convolution group by group, so 20 clients are 20 small kernels in a row. Here a program takes a
tile of one client's outputs. Images are `[batch, clients · channels, height, width]` with the channels last in memory;
stride and dilation are one. Products are taken in TF32, as PyTorch's convolutions are by default.

    out[k, m, o]    = Σ_tap Σ_c x[k, m + tap, c] w[k, tap, o, c]                 m: image, row and column
    dx              the same with dy for x and w turned round
    dw[k, tap, o, c] = Σ_m dy[k, m, o] x[k, m + tap, c]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

_ENOUGH_PROGRAMS = 1024  # for all multiprocessors of a large GPU to be busy
_FEW_CHANNELS = 16  # up to which taps and channels share a tile


@triton.jit
def _rounded(x):
    """To the nearest TF32 number; tensor cores would cut the last 13 bits off, which doubles the error."""
    nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)  # NaN stays NaN


@triton.jit
def _convolve(
    x, weight, out, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    CLIENTS: tl.constexpr, C: tl.constexpr, OUTPUTS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """With BACK the taps of the weights are taken from the last to the first."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BC)
    column, row, image = m % OUT_WIDTH, (m // OUT_WIDTH) % OUT_HEIGHT, m // (OUT_WIDTH * OUT_HEIGHT)
    total = tl.zeros((BM, BN), tl.float32)
    for tap in range(KH * KW):
        i, j = row + tap // KW - PAD_H, column + tap % KW - PAD_W
        inside = (m < rows) & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH)
        pixel = x + ((image * HEIGHT + i) * WIDTH + j).to(tl.int64) * (CLIENTS * C) + client * C
        taken = KH * KW - 1 - tap if BACK else tap
        taps = weight + ((client * KH * KW + taken) * OUTPUTS + n) * C
        for start in range(0, C, BC):
            here = c < C - start
            a = tl.load(pixel[:, None] + (start + c)[None, :], mask=inside[:, None] & here[None, :], other=0.0)
            b = tl.load(taps[:, None] + (start + c)[None, :], mask=(n < OUTPUTS)[:, None] & here[None, :], other=0.0)
            total = tl.dot(_rounded(a), tl.trans(b), total, input_precision="tf32")
    place = out + m.to(tl.int64)[:, None] * (CLIENTS * OUTPUTS) + client * OUTPUTS + n[None, :]
    tl.store(place, total, mask=(m < rows)[:, None] & (n < OUTPUTS)[None, :])


@triton.jit
def _weigh(
    x, slope, out, rows, inputs,
    SHARE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    CLIENTS: tl.constexpr, C: tl.constexpr, OUTPUTS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, FLAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out[share, client, tap, o, c]: the sum over one share of the rows, from `x: [clients · C, rows]` and `slope:
    [clients · O, rows]`. With FLAT a tile covers taps and channels together: for few channels."""
    width: tl.constexpr = KH * KW * C if FLAT else C
    tiles: tl.constexpr = (width + BC - 1) // BC
    n = (tl.program_id(0) // tiles) * BN + tl.arange(0, BN)
    r = (tl.program_id(0) % tiles) * BC + tl.arange(0, BC)
    if FLAT:
        part = tl.program_id(1)
        tap, c = r // C, r % C
    else:
        part = tl.program_id(1) // (KH * KW)
        tap, c = tl.program_id(1) % (KH * KW) + tl.zeros((BC,), tl.int32), r
    client = tl.program_id(2).to(tl.int64)
    channel = x + (client * C + c) * inputs
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SHARE, BM):
        m = part * SHARE + start + tl.arange(0, BM)
        column, row, image = m % OUT_WIDTH, (m // OUT_WIDTH) % OUT_HEIGHT, m // (OUT_WIDTH * OUT_HEIGHT)
        known = m < rows
        a = tl.load(
            slope + (client * OUTPUTS + n)[:, None] * rows + m[None, :],
            mask=(n < OUTPUTS)[:, None] & known[None, :],
            other=0.0,
        )
        if FLAT:
            i, j = row[None, :] + (tap // KW - PAD_H)[:, None], column[None, :] + (tap % KW - PAD_W)[:, None]
            inside = known[None, :] & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH) & (r < width)[:, None]
            place = channel[:, None] + (image[None, :] * HEIGHT + i) * WIDTH + j
        else:
            only = tl.program_id(1) % (KH * KW)
            i, j = row + only // KW - PAD_H, column + only % KW - PAD_W
            inside = (known & (i >= 0) & (i < HEIGHT) & (j >= 0) & (j < WIDTH))[None, :] & (r < width)[:, None]
            place = channel[:, None] + ((image * HEIGHT + i) * WIDTH + j)[None, :]
        total = tl.dot(a, tl.trans(tl.load(place, mask=inside, other=0.0)), total, input_precision="tf32")
    first = (part * CLIENTS + client) * KH * KW
    place = out + ((first + tap[None, :]) * OUTPUTS + n[:, None]) * C + c[None, :]
    tl.store(place, total, mask=(n < OUTPUTS)[:, None] & (r < width)[None, :])


@triton.jit
def _transpose(
    source, out, rows, columns, source_stride, out_stride,
    ROUND: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, BR)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    r, c = (tl.program_id(0) % tiles) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tile = tl.load(source + batch * source_stride + r.to(tl.int64)[:, None] * columns + c[None, :], mask=inside)
    if ROUND:
        tile = _rounded(tile)
    target = out + batch * out_stride + c.to(tl.int64)[:, None] * rows + r[None, :]
    tl.store(target, tl.trans(tile), mask=(c < columns)[:, None] & (r < rows)[None, :])


def _transposed(source: Tensor, out: Tensor | None = None) -> Tensor:
    """`[batch, rows, columns]` → `[batch, columns, rows]`, at the speed of a copy; only the first axis of either may
    have a stride of its own. A new tensor is made for products, so it is rounded; `out` gets the values unrounded."""
    batch, rows, columns = source.shape
    fresh = out is None
    if out is None:
        out = torch.empty(batch, columns, rows, device=source.device, dtype=source.dtype)
    tile = {"BR": 64, "BC": 64} if columns > 16 else {"BR": 256, "BC": 16}
    grid = (batch * triton.cdiv(rows, tile["BR"]), triton.cdiv(columns, tile["BC"]))
    _transpose[grid](source, out, rows, columns, source.stride(0), out.stride(0), fresh, **tile, num_warps=4)
    return out


def _tile(size: int, most: int) -> int:
    return max(16, min(most, int(triton.next_power_of_2(size))))


def _convolved(x: Tensor, weight: Tensor, kernel: tuple[int, int], pad: tuple[int, int], back: bool = False) -> Tensor:
    """`x: [batch, clients · C, height, width]` with the channels last, `weight: [clients, taps, O, C]`."""
    batch, _, height, width = x.shape
    clients, _, outputs, inputs = weight.shape
    size = (height + 2 * pad[0] - kernel[0] + 1, width + 2 * pad[1] - kernel[1] + 1)
    out = torch.empty(
        batch, clients * outputs, *size, device=x.device, dtype=x.dtype, memory_format=torch.channels_last
    )
    rows = batch * size[0] * size[1]
    tile = {"BM": 128, "BN": _tile(outputs, 256), "BC": _tile(inputs, 32)}
    grid = (triton.cdiv(rows, tile["BM"]), triton.cdiv(outputs, tile["BN"]), clients)
    _convolve[grid](
        x, weight, out, rows, height, width, *size, clients, inputs, outputs, *kernel, *pad, back, **tile,
        num_warps=8 if tile["BN"] >= 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def _weighed(x: Tensor, slope: Tensor, clients: int, kernel: tuple[int, int], pad: tuple[int, int]) -> Tensor:
    """Gradient of the weights, `[clients, taps, O, C]`."""
    (batch, wide, height, width), size = x.shape, slope.shape[2:]
    inputs, outputs = wide // clients, slope.shape[1] // clients
    rows, taps = batch * size[0] * size[1], kernel[0] * kernel[1]
    flat = inputs <= _FEW_CHANNELS
    tile = {"BM": 32, "BN": _tile(outputs, 256), "BC": _tile(taps * inputs if flat else inputs, 64)}
    tiles = triton.cdiv(outputs, tile["BN"]) * triton.cdiv(taps * inputs if flat else inputs, tile["BC"])
    programs = tiles * clients * (1 if flat else taps)
    # Few weights are summed in shares of the rows and these added up, in a fixed order.
    shares = max(1, min(_ENOUGH_PROGRAMS // programs, rows // 512))
    share = triton.cdiv(triton.cdiv(rows, shares), tile["BM"]) * tile["BM"]
    shares = triton.cdiv(rows, share)
    out = torch.empty(shares, clients, taps, outputs, inputs, device=x.device, dtype=x.dtype)
    # Channels last → [channels, rows]: what is summed over lies together.
    by_channel = [_transposed(image.permute(0, 2, 3, 1).reshape(1, -1, image.shape[1])) for image in (x, slope)]
    _weigh[(tiles, shares * (1 if flat else taps), clients)](
        *by_channel, out, rows, batch * height * width, share, height, width, *size,
        clients, inputs, outputs, *kernel, *pad, flat, **tile,
        num_warps=8 if tile["BN"] >= 128 else 4, num_stages=3,
    )  # fmt: skip
    return out[0] if shares == 1 else out.sum(dim=0)


class StackedConvolution(torch.autograd.Function):
    """y[k] = x[k] * weight[k] with zeros around the image: `x: [batch, clients · C, height, width]`, `weight: [clients,
    O, C, height, width]`; the gradient of the weight is written into `place`, if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pad: tuple[int, int], place: Tensor | None) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        # [clients, O, C, height, width] → [clients, taps, O, C]: what a product sums over lies together.
        turned = _transposed(weight.flatten(3).flatten(1, 2)).unflatten(2, weight.shape[1:3])
        ctx.save_for_backward(x, turned)
        ctx.shape, ctx.pad, ctx.place = weight.shape, pad, place
        return _convolved(x, turned, (weight.shape[3], weight.shape[4]), pad)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (x, turned), pad, kernel = ctx.saved_tensors, ctx.pad, ctx.shape[3:]
        slope = outputs[0].contiguous(memory_format=torch.channels_last)
        of_x = None
        if ctx.needs_input_grad[0]:
            around = (kernel[0] - 1 - pad[0], kernel[1] - 1 - pad[1])
            swapped = _transposed(turned.flatten(0, 1)).unflatten(0, turned.shape[:2])
            of_x = _convolved(slope, swapped, kernel, around, back=True)
        of_weight = _weighed(x, slope, len(turned), kernel, pad)
        out = x.new_empty(ctx.shape) if ctx.place is None else ctx.place
        _transposed(of_weight.flatten(2), out.flatten(3).flatten(1, 2))
        return of_x, out, None, None


def convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, place: Tensor | None) -> Tensor | None:
    """`StackedConvolution` where it computes what PyTorch would, in TF32, and there are kernels for the layer: strides
    and dilations of one, and less padding than the kernel is wide. Otherwise None."""
    if layer.stride != (1, 1) or layer.dilation != (1, 1) or layer.groups != 1 or isinstance(layer.padding, str):
        return None
    # PyTorch's setting, by its newer name where there is one: mixing both names is an error there.
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "none")
    in_tf32 = torch.backends.cudnn.allow_tf32 if precision == "none" else precision == "tf32"
    float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    narrow = all(pad < size for pad, size in zip(layer.padding, layer.kernel_size, strict=True))
    if not (in_tf32 and float32 and narrow and torch.cuda.get_device_capability(x.device) >= (8, 0)):
        return None
    out: Tensor = StackedConvolution.apply(x, weight, tuple(layer.padding), place)
    return out
