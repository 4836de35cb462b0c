"""Batch norm or group norm, ReLU and 2 x 2 max pooling of many models at once on a GPU, in one pass over memory.

Images are matrices `[rows, channels]`, a row for each image, line and column, with the channels of all clients. The
forward pass saves only its input z; the backward pass computes norm, ReLU and the largest of four again.

    u = γ (z − mean) / sd + β      v = max(u, 0)      p = the largest of four v

    dz = γ / sd (du − mean(du) − ẑ mean(du ẑ))         ẑ = (z − mean) / sd

Group norm has statistics for each image, so a program takes one image of one client.

Products that sum over rows (gradients of weights) read matrices `[channels, rows]` faster, so outputs can be written in
both layouts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pfedlms.models.products_gpu import prepared, rounded

_PARTS = 64  # parts of the rows; one program adds up their sums
_CHANNELS = 32
_IMAGE = 1 << 14  # most numbers of an image that a program holds
_SHORT_LINE = 16  # pixels; for shorter lines a separate pass transposes the pooled gradients


@triton.jit
def _finish(
    means, squares, mean_out, scale_out, running_mean, running_var,
    tiles: tl.constexpr, rows, wide, momentum, eps,
    TILE: tl.constexpr, RUNNING: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / sd of each channel, from those of tiles of TILE rows; running statistics as PyTorch keeps them."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    here = c < wide
    total = tl.zeros((BT, BC), tl.float32)
    for start in range(0, tiles, BT):
        t = start + tl.arange(0, BT)
        count = tl.minimum(TILE, tl.maximum(rows - t * TILE, 0)).to(tl.float32)
        mask = (t < tiles)[:, None] & here[None, :]
        total += count[:, None] * tl.load(means + t[:, None] * wide + c[None, :], mask=mask, other=0.0)
    mean = tl.sum(total, axis=0) / rows
    total = tl.zeros((BT, BC), tl.float32)
    for start in range(0, tiles, BT):
        t = start + tl.arange(0, BT)
        count = tl.minimum(TILE, tl.maximum(rows - t * TILE, 0)).to(tl.float32)
        mask = (t < tiles)[:, None] & here[None, :]
        apart = tl.load(means + t[:, None] * wide + c[None, :], mask=mask, other=0.0) - mean[None, :]
        total += tl.load(squares + t[:, None] * wide + c[None, :], mask=mask, other=0.0)
        total += tl.where(mask, count[:, None] * apart * apart, 0.0)
    square = tl.sum(total, axis=0)
    tl.store(mean_out + c, mean, mask=here)
    tl.store(scale_out + c, 1.0 / tl.sqrt(square / rows + eps), mask=here)
    if RUNNING:
        before = tl.load(running_mean + c, mask=here)
        tl.store(running_mean + c, (1 - momentum) * before + momentum * mean, mask=here)
        before = tl.load(running_var + c, mask=here)
        tl.store(running_var + c, (1 - momentum) * before + momentum * (square / (rows - 1)), mask=here)


@triton.jit
def _place(p, di: tl.constexpr, dj: tl.constexpr, HEIGHT, WIDTH, POOL: tl.constexpr):
    """The row of z that output row `p` takes one of its values from."""
    if POOL:
        half = WIDTH // 2
        j, i, image = p % half, (p // half) % (HEIGHT // 2), p // (half * (HEIGHT // 2))
        row = (image * HEIGHT + 2 * i + di) * WIDTH + 2 * j + dj
    else:
        row = p
    return row.to(tl.int64)


@triton.jit
def _apply(
    z, means, scales, gamma, beta, out, turned, count, wide,
    HEIGHT, WIDTH, POOL: tl.constexpr, ROUND: tl.constexpr, TURN: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0) * BP + tl.arange(0, BP), tl.program_id(1) * BC + tl.arange(0, BC)
    here = c < wide
    mask = (p < count)[:, None] & here[None, :]
    mean, scale = tl.load(means + c, mask=here, other=0.0), tl.load(scales + c, mask=here, other=0.0)
    scale *= tl.load(gamma + c, mask=here, other=0.0)
    shift = tl.load(beta + c, mask=here, other=0.0)
    best = tl.zeros((BP, BC), tl.float32)
    for di in tl.static_range(2 if POOL else 1):
        for dj in tl.static_range(2 if POOL else 1):
            place = _place(p, di, dj, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :]
            u = (tl.load(z + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :] + shift[
                None, :
            ]
            best = tl.where(u <= best, best, u)  # NaN stays NaN
    if ROUND:
        best = rounded(best)
    best = best.to(out.dtype.element_ty)
    tl.store(out + p.to(tl.int64)[:, None] * wide + c[None, :], best, mask=mask)
    if TURN:
        place = turned + c.to(tl.int64)[:, None] * count + p[None, :]
        tl.store(place, tl.trans(best), mask=here[:, None] & (p < count)[None, :])


@triton.jit
def _slopes(
    z, slope, p, c, mask, mean, scale, weight, shift, wide,
    HEIGHT, WIDTH, POOL: tl.constexpr,
):  # fmt: skip
    """ẑ and du at the four places (or at the one) of output rows `p`; the first of the largest has the gradient."""
    of_out = tl.load(slope + p.to(tl.int64)[:, None] * wide + c[None, :], mask=mask, other=0.0).to(tl.float32)
    z00 = tl.load(z + _place(p, 0, 0, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], mask=mask, other=0.0)
    z00 = (z00.to(tl.float32) - mean[None, :]) * scale[None, :]
    u00 = z00 * weight[None, :] + shift[None, :]
    if POOL:
        z01 = tl.load(z + _place(p, 0, 1, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], mask=mask, other=0.0)
        z10 = tl.load(z + _place(p, 1, 0, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], mask=mask, other=0.0)
        z11 = tl.load(z + _place(p, 1, 1, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], mask=mask, other=0.0)
        z01 = (z01.to(tl.float32) - mean[None, :]) * scale[None, :]
        z10 = (z10.to(tl.float32) - mean[None, :]) * scale[None, :]
        z11 = (z11.to(tl.float32) - mean[None, :]) * scale[None, :]
        u01 = z01 * weight[None, :] + shift[None, :]
        u10 = z10 * weight[None, :] + shift[None, :]
        u11 = z11 * weight[None, :] + shift[None, :]
        best = tl.maximum(tl.maximum(u00, u01), tl.maximum(u10, u11))
        of_out = tl.where(best > 0, of_out, 0.0)
        d00 = tl.where(u00 == best, of_out, 0.0)
        left = tl.where(u00 == best, 0.0, of_out)
        d01 = tl.where(u01 == best, left, 0.0)
        left = tl.where(u01 == best, 0.0, left)
        d10 = tl.where(u10 == best, left, 0.0)
        d11 = tl.where(u10 == best, 0.0, left)
    else:
        d00 = tl.where(u00 > 0, of_out, 0.0)
        z01, z10, z11, d01, d10, d11 = z00, z00, z00, d00, d00, d00
    return z00, z01, z10, z11, d00, d01, d10, d11


@triton.jit
def _sum_slopes(
    z, slope, means, scales, gamma, beta, sums, products, count, wide, SHARE: tl.constexpr,
    HEIGHT, WIDTH, POOL: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ du and Σ du ẑ over one part of the output rows, `[parts, channels]`."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    here = c < wide
    mean, scale = tl.load(means + c, mask=here, other=0.0), tl.load(scales + c, mask=here, other=0.0)
    weight, shift = tl.load(gamma + c, mask=here, other=0.0), tl.load(beta + c, mask=here, other=0.0)
    total, product = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    for start in range(0, SHARE, BP):
        p = tl.program_id(0) * SHARE + start + tl.arange(0, BP)
        mask = (p < count)[:, None] & here[None, :]
        z00, z01, z10, z11, d00, d01, d10, d11 = _slopes(
            z, slope, p, c, mask, mean, scale, weight, shift, wide, HEIGHT, WIDTH, POOL
        )
        if POOL:
            total += d00 + d01 + d10 + d11
            product += d00 * z00 + d01 * z01 + d10 * z10 + d11 * z11
        else:
            total += d00
            product += d00 * z00
    place = tl.program_id(0) * wide + c
    tl.store(sums + place, tl.sum(total, axis=0), mask=here)
    tl.store(products + place, tl.sum(product, axis=0), mask=here)


@triton.jit
def _add_parts(
    sums, products, of_gamma, of_beta, totals, parts, wide, stride, C: tl.constexpr, PARTS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Write the gradients of γ and β into `of_gamma` and `of_beta`, and both into `totals: [2, channels]`."""
    c, part = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PARTS)
    here = c < wide
    place, mask = part[:, None] * wide + c[None, :], (part < parts)[:, None] & here[None, :]
    total = tl.sum(tl.load(sums + place, mask=mask, other=0.0), axis=0)
    product = tl.sum(tl.load(products + place, mask=mask, other=0.0), axis=0)
    own = (c // C).to(tl.int64) * stride + c % C
    tl.store(of_gamma + own, product, mask=here)
    tl.store(of_beta + own, total, mask=here)
    tl.store(totals + c, total, mask=here)
    tl.store(totals + wide + c, product, mask=here)


@triton.jit
def _back(
    z, slope, means, scales, gamma, beta, totals, out, turned, count, rows, wide,
    HEIGHT, WIDTH, POOL: tl.constexpr, ROUND: tl.constexpr, TURN: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    p, c = tl.program_id(0) * BP + tl.arange(0, BP), tl.program_id(1) * BC + tl.arange(0, BC)
    here = c < wide
    total, product = tl.load(totals + c, mask=here, other=0.0), tl.load(totals + wide + c, mask=here, other=0.0)
    mask = (p < count)[:, None] & here[None, :]
    mean, scale = tl.load(means + c, mask=here, other=0.0), tl.load(scales + c, mask=here, other=0.0)
    weight, shift = tl.load(gamma + c, mask=here, other=0.0), tl.load(beta + c, mask=here, other=0.0)
    z00, z01, z10, z11, d00, d01, d10, d11 = _slopes(
        z, slope, p, c, mask, mean, scale, weight, shift, wide, HEIGHT, WIDTH, POOL
    )
    factor, total, product = (weight * scale)[None, :], (total / rows)[None, :], (product / rows)[None, :]
    g00 = factor * (d00 - total - z00 * product)
    if ROUND:
        g00 = rounded(g00)
    if POOL:
        g01 = factor * (d01 - total - z01 * product)
        g10 = factor * (d10 - total - z10 * product)
        g11 = factor * (d11 - total - z11 * product)
        if ROUND:
            g01, g10, g11 = rounded(g01), rounded(g10), rounded(g11)
        kind = out.dtype.element_ty
        tl.store(out + _place(p, 0, 0, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], g00.to(kind), mask=mask)
        tl.store(out + _place(p, 0, 1, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], g01.to(kind), mask=mask)
        tl.store(out + _place(p, 1, 0, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], g10.to(kind), mask=mask)
        tl.store(out + _place(p, 1, 1, HEIGHT, WIDTH, POOL)[:, None] * wide + c[None, :], g11.to(kind), mask=mask)
        if TURN:
            # Two neighbours of a line lie together: [BP, BC] twice → [BC, 2 BP].
            upper = tl.reshape(tl.permute(tl.join(g00, g01), (1, 0, 2)), (BC, 2 * BP))
            lower = tl.reshape(tl.permute(tl.join(g10, g11), (1, 0, 2)), (BC, 2 * BP))
            q = tl.program_id(0) * (2 * BP) + tl.arange(0, 2 * BP)  # output row and which of the two
            j, rest = q % WIDTH, q // WIDTH
            i, image = rest % (HEIGHT // 2), rest // (HEIGHT // 2)
            row = (image * HEIGHT + 2 * i) * WIDTH + j
            inside = here[:, None] & (q < 2 * count)[None, :]
            place = turned + c.to(tl.int64)[:, None] * rows + row[None, :]
            tl.store(place, upper.to(kind), mask=inside)
            tl.store(place + WIDTH, lower.to(kind), mask=inside)
    else:
        tl.store(out + p.to(tl.int64)[:, None] * wide + c[None, :], g00.to(out.dtype.element_ty), mask=mask)
        if TURN:
            place = turned + c.to(tl.int64)[:, None] * rows + p[None, :]
            tl.store(place, tl.trans(g00).to(out.dtype.element_ty), mask=here[:, None] & (p < count)[None, :])


@triton.jit
def _over_groups(values, C: tl.constexpr, GROUPS: tl.constexpr):
    """Sums `[C]` of channels → for each channel the sum of its group."""
    sums = tl.sum(tl.reshape(values, (GROUPS, C // GROUPS)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (GROUPS, C // GROUPS)), (C,))


@triton.jit
def _group_norm(
    x, gamma, beta, out, means, scales, size, wide, eps,
    C: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    image, client = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, c = tl.arange(0, BP), tl.arange(0, C)
    channel, mask = client * C + c, (p < size)[:, None]
    place = (image * size + p)[:, None] * wide + channel[None, :]
    z = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    count = size * (C // GROUPS)
    mean = _over_groups(tl.sum(z, axis=0), C, GROUPS) / count
    z = tl.where(mask, z - mean[None, :], 0.0)
    scale = 1.0 / tl.sqrt(_over_groups(tl.sum(z * z, axis=0), C, GROUPS) / count + eps)
    u = z * (scale * tl.load(gamma + channel))[None, :] + tl.load(beta + channel)[None, :]
    if RELU:
        u = tl.where(u <= 0, 0.0, u)  # NaN stays NaN
    tl.store(out + place, u.to(out.dtype.element_ty), mask=mask)
    tl.store(means + image * wide + channel, mean)
    tl.store(scales + image * wide + channel, scale)


@triton.jit
def _group_norm_back(
    x, slope, gamma, beta, means, scales, out, of_gamma, of_beta, size, wide,
    C: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """dz, and of each image Σ du ẑ and Σ du, `[images, channels]`."""
    image, client = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, c = tl.arange(0, BP), tl.arange(0, C)
    channel, mask = client * C + c, (p < size)[:, None]
    place, own = (image * size + p)[:, None] * wide + channel[None, :], image * wide + channel
    mean, scale = tl.load(means + own), tl.load(scales + own)
    weight, shift = tl.load(gamma + channel), tl.load(beta + channel)
    z = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    du = tl.load(slope + place, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        du = tl.where(z * weight[None, :] + shift[None, :] > 0, du, 0.0)
    total, product = tl.sum(du, axis=0), tl.sum(du * z, axis=0)
    tl.store(of_beta + own, total)
    tl.store(of_gamma + own, product)
    count = size * (C // GROUPS)
    total = _over_groups(total * weight, C, GROUPS) / count
    product = _over_groups(product * weight, C, GROUPS) / count
    dz = scale[None, :] * (du * weight[None, :] - total[None, :] - z * product[None, :])
    tl.store(out + place, dz.to(out.dtype.element_ty), mask=mask)


def groups_fit(channels: int, size: int) -> bool:
    """Whether a program can hold one client's image of `size` pixels."""
    power = int(triton.next_power_of_2(channels)) == channels
    return power and channels * int(triton.next_power_of_2(size)) <= _IMAGE


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, size: int, channels: int, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, means and 1 / sd `[images, clients · channels]` of `x: [images · size, clients · channels]`."""
    images, wide = len(x) // size, x.shape[1]
    out = torch.empty_like(x)
    mean, scale = (torch.empty(images, wide, device=x.device) for _ in range(2))
    tile = _image_tile(channels, size)
    _group_norm[(images, wide // channels)](
        x, gamma, beta, out, mean, scale, size, wide, eps, channels, groups, relu, **tile
    )
    return out, mean, scale


def group_norm_back(
    x: Tensor, slope: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, scale: Tensor, size: int, channels: int,
    groups: int, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, γ and β, the last two `[clients · channels]`."""
    out, of_gamma, of_beta = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
    tile = _image_tile(channels, size)
    _group_norm_back[(len(mean), x.shape[1] // channels)](
        x, slope, gamma, beta, mean, scale, out, of_gamma, of_beta, size, x.shape[1], channels, groups, relu, **tile
    )
    return out, of_gamma.sum(dim=0), of_beta.sum(dim=0)


def _image_tile(channels: int, size: int) -> dict[str, int]:
    pixels = int(triton.next_power_of_2(size))
    return {"BP": pixels, "num_warps": max(1, min(16, channels * pixels // 1024))}


def finish(
    means: Tensor, squares: Tensor, rows: int, tile: int, eps: float, momentum: float,
    running: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean and 1 / sd of each channel from the statistics of tiles, `[tiles, channels]`; `running` is updated."""
    tiles, wide = means.shape
    mean, scale = (torch.empty(wide, device=means.device) for _ in range(2))
    kept = running or (mean, scale)
    _finish[(triton.cdiv(wide, 16),)](
        means, squares, mean, scale, *kept, tiles, rows, wide, momentum, eps, tile, running is not None,
        BT=64, BC=16, num_warps=4,
    )  # fmt: skip
    return mean, scale


def applied(
    z: Tensor, mean: Tensor, scale: Tensor, gamma: Tensor, beta: Tensor, image: tuple[int, int], pool: bool,
    kind: torch.dtype, products: bool, turn: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output p `[rows, channels]` and, with `turn`, also `[channels, rows]`; rounded for use in `products`."""
    rows, wide = z.shape
    count = rows // 4 if pool else rows
    out = torch.empty(count, wide, device=z.device, dtype=kind)
    turned = torch.empty(wide, count, device=z.device, dtype=kind) if turn else out
    tile = {"BP": 32, "BC": 64}
    _apply[(triton.cdiv(count, tile["BP"]), triton.cdiv(wide, tile["BC"]))](
        z, mean, scale, gamma, beta, out, turned, count, wide, *image, pool, products and kind == torch.float32, turn,
        **tile, num_warps=4,
    )  # fmt: skip
    return out, turned


def back(
    z: Tensor, slope: Tensor, mean: Tensor, scale: Tensor, gamma: Tensor, beta: Tensor, image: tuple[int, int],
    pool: bool, of_gamma: Tensor, of_beta: Tensor, turn: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dz, in the layouts for products, from the gradient `slope` of p. Writes the gradients of γ and β into `of_gamma`
    and `of_beta`, `[clients, channels]`, which have the same stride."""
    rows, wide = z.shape
    count = rows // 4 if pool else rows
    rows_at_once = 16 if pool else 64
    share = triton.cdiv(triton.cdiv(count, _PARTS), rows_at_once) * rows_at_once
    parts = triton.cdiv(count, share)
    sums, products = (torch.empty(parts, wide, device=z.device) for _ in range(2))
    grid = (parts, triton.cdiv(wide, _CHANNELS))
    _sum_slopes[grid](
        z, slope, mean, scale, gamma, beta, sums, products, count, wide, share, *image, pool,
        BP=rows_at_once, BC=_CHANNELS, num_warps=4,
    )  # fmt: skip
    totals = torch.empty(2, wide, device=z.device)
    _add_parts[(triton.cdiv(wide, _CHANNELS),)](
        sums, products, of_gamma, of_beta, totals, parts, wide, of_gamma.stride(0), of_gamma.shape[1],
        PARTS=_PARTS, BC=_CHANNELS, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(z)
    after = turn and pool and image[1] < _SHORT_LINE
    turn = turn and not after
    turned = torch.empty(wide, rows, device=z.device, dtype=z.dtype) if turn else out
    tile = {"BP": 32 if pool else 64, "BC": 32}
    _back[(triton.cdiv(count, tile["BP"]), triton.cdiv(wide, tile["BC"]))](
        z, slope, mean, scale, gamma, beta, totals, out, turned, count, rows, wide,
        *image, pool, z.dtype == torch.float32, turn, **tile, num_warps=4,
    )  # fmt: skip
    return prepared(out, out.dtype, turn=True, copy=False) if after else (out, turned)
