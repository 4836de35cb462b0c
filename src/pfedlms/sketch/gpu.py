"""The sketch, its adjoint and the whole pull as Triton kernels, for GPUs (and, slowly, for Triton's interpreter).

A padded layer of N = 2^k entries is seen as a matrix of N / B rows of B = 2^12 contiguous entries:

    block pass     one program takes one row of B entries through the stages 1, 2, …, B/2 in registers
    column pass    one program takes R ≤ 64 entries a stride apart through log2 R stages, for many columns

So N ≤ 2^12 takes one pass over memory, N ≤ 2^18 two and N ≤ 2^24 three. Stages run in the order of `hadamard`, each as
(a + b, a − b), so results are those of the CPU bit for bit. Signs are hashed where they are used; the pull computes y
= Φθ, the slope of the regulariser and Φᵀ of it without a gather: q̃ lies in position space, with a mark where a row
was not kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
COLUMNS = 256
TILE = 4096
RADIX = 64
NOT_KEPT = -1


@triton.jit
def _stages(x, SIZE: tl.constexpr, LOG: tl.constexpr):
    """Stages 1, 2, …, SIZE/2 on a block `[SIZE]`."""
    for stage in tl.static_range(LOG):
        pairs = tl.permute(tl.reshape(x, (SIZE // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def _signs(key, index):
    """Rademacher signs of a SplitMix64 stream: −1 where bit index % 64 of word index // 64 is set."""
    z = key + ((index // 64).to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    bit = (z >> (index % 64).to(tl.uint64)) & 1
    return 1.0 - 2.0 * bit.to(tl.float32)


@triton.jit
def _slope(y, q, tau, inverse_width, T: tl.constexpr):
    """(1/T) [Σ_t clip((y − τ_t)/ρ, −1, 1) − (2q̃ − T)], zero where the row was not kept; see `regulariser`."""
    total = T - 2.0 * q.to(tl.float32)
    for t in tl.static_range(T):
        step = (y - tl.load(tau + t)) * inverse_width
        total += tl.minimum(tl.maximum(step, -1.0), 1.0)
    return tl.where(q >= 0, total / T, 0.0)


@triton.jit
def _block_in(theta, dim, offset, size, key, work, pad, SIGNS: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr):
    """work[client, block] ← stages of (padded θ · signs)."""
    client, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = block * SIZE + tl.arange(0, SIZE)
    x = tl.load(theta + client * dim + offset + index, mask=index < size, other=0.0)
    if SIGNS:
        x *= _signs(tl.load(key).to(tl.uint64, bitcast=True), index)
    tl.store(work + client * pad + index, _stages(x, SIZE, LOG))


@triton.jit
def _block_out(
    work, pad, key, scale, out, dim, offset, size, SIGNS: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr
):
    """out[client, layer] ← scale · signs · stages of work."""
    client, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = block * SIZE + tl.arange(0, SIZE)
    x = _stages(tl.load(work + client * pad + index), SIZE, LOG) * scale
    if SIGNS:
        x *= _signs(tl.load(key).to(tl.uint64, bitcast=True), index)
    tl.store(out + client * dim + offset + index, x, mask=index < size)


@triton.jit
def _columns(
    work,
    pad,
    stride,
    kept,
    tau,
    width,
    scale,
    PULL: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    LOG: tl.constexpr,
    WIDE: tl.constexpr,
):
    """In place: log2 R stages over entries `stride` apart; with PULL then y = scale · x, its slope, and the same
    stages back."""
    client, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    tiles = stride // WIDE
    start = (tile // tiles) * stride * R + (tile % tiles) * WIDE
    index = start + tl.arange(0, R)[None, :] * stride + tl.arange(0, WIDE)[:, None]
    x = tl.load(work + client * pad + index)
    x = _row_stages(x, R, LOG, WIDE)
    if PULL:
        q = tl.load(kept + index)
        rho = tl.load(width)
        inverse = 1.0 / tl.where(rho > 0, rho, 1.0)
        x = tl.where(rho > 0, _slope(x * scale, q, tau, inverse, T), 0.0)
        x = _row_stages(x, R, LOG, WIDE)
    tl.store(work + client * pad + index, x)


@triton.jit
def _row_stages(x, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr):
    """Stages along the last axis of `[WIDE, R]`."""
    for stage in tl.static_range(LOG):
        pairs = tl.permute(tl.reshape(x, (WIDE, R // (2 << stage), 2, 1 << stage)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (WIDE, R))
    return x


@triton.jit
def _pull_block(
    theta,
    dim,
    offset,
    size,
    key,
    kept,
    tau,
    width,
    scale,
    back,
    out,
    T: tl.constexpr,
    SIZE: tl.constexpr,
    LOG: tl.constexpr,
):
    """The whole pull of a layer that fits one block."""
    client = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    signs = _signs(tl.load(key).to(tl.uint64, bitcast=True), index)
    x = tl.load(theta + client * dim + offset + index, mask=index < size, other=0.0) * signs
    y = _stages(x, SIZE, LOG) * scale
    rho = tl.load(width)
    inverse = 1.0 / tl.where(rho > 0, rho, 1.0)
    slope = tl.where(rho > 0, _slope(y, tl.load(kept + index), tau, inverse, T), 0.0)
    x = _stages(slope, SIZE, LOG) * back * signs
    tl.store(out + client * dim + offset + index, x, mask=index < size)


def _log2(value: int) -> int:
    return value.bit_length() - 1


def _warps(size: int) -> int:
    return max(1, min(8, size // 512))


def _column_passes(pad: int) -> list[tuple[int, int]]:
    """(stride, radix) of the passes after the block pass, in the order of stages, as even as they come."""
    bits = _log2(pad) - _log2(BLOCK)
    if bits <= 0:
        return []
    count = -(-bits // _log2(RADIX))
    passes: list[tuple[int, int]] = []
    stride = BLOCK
    for number in range(count):
        share = -(-bits // (count - number))
        passes.append((stride, 1 << share))
        stride <<= share
        bits -= share
    return passes


def passes(pad: int) -> int:
    """How often a transform of `pad` entries goes over memory."""
    return 1 + len(_column_passes(pad))


def _run_columns(work: Tensor, stride: int, radix: int, pull: tuple[Tensor, Tensor, Tensor, float] | None) -> None:
    clients, pad = work.shape
    wide = min(COLUMNS, TILE // radix)
    kept, tau, width, scale = pull or (work, work, work, 1.0)
    levels = tau.shape[-1] if pull else 1
    grid = (pad // (wide * radix), clients)
    _columns[grid](
        work,
        pad,
        stride,
        kept,
        tau,
        width,
        scale,
        PULL=pull is not None,
        T=levels,
        R=radix,
        LOG=_log2(radix),
        WIDE=wide,
        num_warps=4,
    )


def _enter(theta: Tensor, offset: int, size: int, pad: int, key: Tensor | None) -> Tensor:
    """Pad, flip signs and do the block pass: `[clients, pad]`."""
    work = torch.empty(len(theta), pad, device=theta.device, dtype=torch.float32)
    block = min(pad, BLOCK)
    grid = (pad // block, len(theta))
    _block_in[grid](
        theta, theta.stride(0), offset, size, theta if key is None else key, work, pad,
        SIGNS=key is not None, SIZE=block, LOG=_log2(block), num_warps=_warps(block),
    )  # fmt: skip
    return work


def _leave(work: Tensor, out: Tensor, offset: int, size: int, key: Tensor | None, scale: float) -> None:
    clients, pad = work.shape
    block = min(pad, BLOCK)
    grid = (pad // block, clients)
    _block_out[grid](
        work, pad, work if key is None else key, scale, out, out.stride(0), offset, size,
        SIGNS=key is not None, SIZE=block, LOG=_log2(block), num_warps=_warps(block),
    )  # fmt: skip


def fwht(values: Tensor) -> Tensor:
    """H x along the last axis of `[rows, N]` float32, N ≥ 2 a power of two; the same bits as `fwht_reference`."""
    pad = values.shape[1]
    work = _enter(values, 0, pad, pad, None)
    for stride, radix in _column_passes(pad):
        _run_columns(work, stride, radix, None)
    return work


def transform(theta: Tensor, offset: int, size: int, pad: int, key: Tensor) -> Tensor:
    """H D P θ of one layer: `[clients, dim]` → `[clients, pad]`; `key: [1]` is the layer's sign stream as int64."""
    work = _enter(theta, offset, size, pad, key)
    for stride, radix in _column_passes(pad):
        _run_columns(work, stride, radix, None)
    return work


def transform_back(work: Tensor, out: Tensor, offset: int, size: int, key: Tensor, scale: float) -> None:
    """out[:, offset : offset + size] ← scale · Pᵀ D H work; `work` is overwritten."""
    for stride, radix in reversed(_column_passes(work.shape[1])):
        _run_columns(work, stride, radix, None)
    _leave(work, out, offset, size, key, scale)


def pull_layer(
    theta: Tensor, out: Tensor, offset: int, size: int, pad: int, key: Tensor,
    kept: Tensor, tau: Tensor, width: Tensor, scale: float, strength: float,
) -> None:  # fmt: skip
    """out[:, layer] ← λ Φᵀ ∇_y R̃_ρ(Φθ): `kept: [pad]` is q̃ at the rows kept and −1 elsewhere, int16, `tau: [T]`,
    `width: [1]`."""
    if pad <= BLOCK:
        _pull_block[(len(theta),)](
            theta, theta.stride(0), offset, size, key, kept, tau, width, scale, scale * strength, out,
            T=tau.shape[-1], SIZE=pad, LOG=_log2(pad), num_warps=_warps(pad),
        )  # fmt: skip
        return
    work = _enter(theta, offset, size, pad, key)
    *inner, (stride, radix) = _column_passes(pad)
    for each in inner:
        _run_columns(work, *each, None)
    # After the last stage every entry of y is in a register: the slope is taken there and the way back starts at once.
    _run_columns(work, stride, radix, (kept, tau, width, scale))
    for each in reversed(inner):
        _run_columns(work, *each, None)
    _leave(work, out, offset, size, key, scale * strength)
