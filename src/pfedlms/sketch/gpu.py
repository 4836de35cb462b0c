"""The sketch and its adjoint as Triton kernels, for GPUs (and, slowly, for Triton's interpreter).

A padded layer of N = 2^k entries is seen as a matrix of N / B rows of B = 2^12 contiguous entries:

    block pass     one program takes one row of B entries through the stages 1, 2, …, B/2 in registers
    column pass    one program takes R ≤ 64 entries a stride apart through log2 R stages, for many columns

So N ≤ 2^12 takes one pass over memory, N ≤ 2^18 two and N ≤ 2^24 three. Stages run in the order of `hadamard`, each as
(a + b, a − b), so results are those of the CPU bit for bit. Signs are hashed where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from pfedlms.sketch import Shape, Sketch

BLOCK = 4096
COLUMNS = 256
TILE = 4096
RADIX = 64
ROWS = 1024


class Layer(NamedTuple):
    """One layer's part of a sketch: where its parameters begin, how many there are, the padded length, its sign
    stream `key: [1]`, the rows kept, where they start in a sketch, and the scale 1/√m in float32."""

    begin: int
    size: int
    pad: int
    key: Tensor
    rows: Tensor
    start: int
    scale: float


def layers_of(sketch: Sketch) -> Iterator[Layer]:
    for index, place in enumerate(sketch.shape.places):
        begin, end, pad, start, stop = place
        key, rows = sketch.keys[index : index + 1], sketch.rows[start:stop]
        yield Layer(begin, end - begin, pad, key, rows, start, float(np.float32(place.scale)))


def forward(sketch: Sketch, params: Tensor) -> Tensor:
    params, parts = params.contiguous(), []
    for layer in layers_of(sketch):
        work = enter(params, layer.begin, layer.size, layer.pad, layer.key)
        for stride, radix in column_passes(layer.pad):
            run_columns(work, stride, radix)
        parts.append(work[:, layer.rows] * layer.scale)
    return torch.cat(parts, dim=1)


def adjoint(sketch: Sketch, sketched: Tensor, scaled: bool = True) -> Tensor:
    out = sketched.new_empty(len(sketched), sketch.dim)
    for layer in layers_of(sketch):
        work = sketched.new_zeros(len(sketched), layer.pad)
        work[:, layer.rows] = sketched[:, layer.start : layer.start + len(layer.rows)]
        for stride, radix in reversed(column_passes(layer.pad)):
            run_columns(work, stride, radix)
        leave(work, out, layer.begin, layer.size, layer.key, layer.scale if scaled else 1.0)
    return out


def split(sketch: Sketch, params: Tensor, model: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    given = [value.contiguous() for value in (params, model, residual)]
    sketched, unsent = params.new_empty(len(params), sketch.size), torch.empty_like(given[0])
    positions = sketch.positions.split([place.pad for place in sketch.shape.places])
    for layer, own, place in zip(layers_of(sketch), positions, sketch.shape.places, strict=True):
        _split_layer(layer, given, own, float(np.float32(place.scale * place.share)), sketched, unsent)
    return sketched, unsent


def _split_layer(
    layer: Layer, given: list[Tensor], positions: Tensor, back: float, sketched: Tensor, unsent: Tensor
) -> None:
    """One layer of `Sketch.split`, with `positions: [pad]`."""
    begin, size, pad, key, _, _, scale = layer
    clients, dim = unsent.shape
    block = min(pad, BLOCK)
    grid, shape = (pad // block, clients), {"SIZE": block, "LOG": log2(block), "num_warps": warps(block)}
    work = unsent.new_empty(clients, pad if pad > block else 0)
    _split_in[grid](
        *given, dim, begin, size, key, positions, scale, back, work, pad, sketched, sketched.shape[1], unsent,
        WHOLE=pad == block, **shape,
    )  # fmt: skip
    if pad == block:
        return
    *inner, (stride, radix) = column_passes(pad)
    for each in inner:
        run_columns(work, *each)
    # After the last stage every entry of y is in a register: it is kept or dropped there, and the way back starts.
    wide = columns_at_once(radix)
    _turn_kept[(pad // (wide * radix), clients)](
        work, pad, stride, positions, scale, sketched, sketched.shape[1], R=radix, LOG=log2(radix), WIDE=wide,
        num_warps=4,
    )  # fmt: skip
    for each in reversed(inner):
        run_columns(work, *each)
    _split_out[grid](work, pad, key, back, unsent, dim, begin, size, **shape)


def fwht(values: Tensor) -> Tensor:
    """H x along the last axis of `[rows, N]` float32, N ≥ 2 a power of two; the same bits as `fwht_reference`."""
    pad = values.shape[1]
    work = enter(values, 0, pad, pad, None)
    for stride, radix in column_passes(pad):
        run_columns(work, stride, radix)
    return work


def kept_rows(shape: Shape, constants: Tensor) -> Tensor:
    """The rows kept of all layers, `[Σ m]`; `constants` as in `sketch.kept_rows`."""
    layers, largest = len(shape.places), max(place.stop - place.start for place in shape.places)
    rows = torch.empty(shape.places[-1].stop, device=constants.device, dtype=torch.int64)
    _kept_rows[(triton.cdiv(largest, ROWS), layers)](
        constants, layers, rows, ROUNDS=(len(constants) - 3) // 2, SIZE=ROWS, num_warps=4
    )
    return rows


def positions(sketch: Sketch) -> Tensor:
    """`Sketch.positions`."""
    shape, rows = sketch.shape, sketch.rows
    places = places_on(shape, rows.device)
    everywhere = torch.full((sum(place.pad for place in shape.places),), -1, dtype=torch.int32, device=rows.device)
    _place_rows[(triton.cdiv(max(sketch.sizes), ROWS), len(shape.places))](
        rows, places, everywhere, SIZE=ROWS, num_warps=4
    )
    return everywhere


@lru_cache(maxsize=16)
def places_on(shape: Shape, device: torch.device) -> Tensor:
    """Where the part of every layer starts and stops in a sketch, and where its rows begin among those of all padded
    layers: `[layers, 3]` on `device`."""
    table, begin = [], 0
    for place in shape.places:
        table.append((place.start, place.stop, begin))
        begin += place.pad
    return torch.tensor(table, device=device)


@triton.jit
def _place_rows(rows, places, everywhere, SIZE: tl.constexpr):
    """everywhere[begin + row] ← the entry of a sketch that the row gives, for the rows kept of one layer."""
    own = places + 3 * tl.program_id(1)
    start, stop, begin = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    entry = start + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + entry, mask=entry < stop, other=0)
    tl.store(everywhere + begin + row, entry.to(tl.int32), mask=entry < stop)


@triton.jit
def _kept_rows(constants, layers, rows, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    """`rng.row_images` of 0, 1, …, m − 1 of one layer."""
    own = constants + tl.program_id(1)
    bits = tl.load(own)
    start, stop = tl.load(own + layers), tl.load(own + 2 * layers)
    x = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    place, mask, shift = start + x, (tl.full((), 1, tl.int64) << bits) - 1, tl.maximum((bits + 1) // 2, 1)
    for r in tl.static_range(ROUNDS):
        x = (x * tl.load(own + (3 + 2 * r) * layers) + tl.load(own + (4 + 2 * r) * layers)) & mask
        x ^= x >> shift
    tl.store(rows + place, x, mask=place < stop)


@triton.jit
def block_stages(x, SIZE: tl.constexpr, LOG: tl.constexpr):
    """Stages 1, 2, …, SIZE/2 on a block `[SIZE]`."""
    for stage in tl.static_range(LOG):
        pairs = tl.permute(tl.reshape(x, (SIZE // (2 << stage), 2, 1 << stage)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def column_stages(x, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr):
    """Stages along the last axis of `[WIDE, R]`."""
    for stage in tl.static_range(LOG):
        pairs = tl.permute(tl.reshape(x, (WIDE, R // (2 << stage), 2, 1 << stage)), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (WIDE, R))
    return x


@triton.jit
def column_index(tile, stride, R: tl.constexpr, WIDE: tl.constexpr):
    """Where the entries `[WIDE, R]` of a tile lie: `stride` apart along the last axis."""
    tiles = stride // WIDE
    start = (tile // tiles) * stride * R + (tile % tiles) * WIDE
    return start + tl.arange(0, R)[None, :] * stride + tl.arange(0, WIDE)[:, None]


@triton.jit
def hashed_signs(key, index):
    """Rademacher signs of the SplitMix64 stream at `key`: −1 where bit index % 64 of word index // 64 is set."""
    z = tl.load(key).to(tl.uint64, bitcast=True) + ((index // 64).to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    bit = (z >> (index % 64).to(tl.uint64)) & 1
    return 1.0 - 2.0 * bit.to(tl.float32)


@triton.jit
def _block_in(theta, dim, offset, size, key, work, pad, SIGNS: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr):
    """work[client, block] ← stages of (padded θ · signs)."""
    client, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = block * SIZE + tl.arange(0, SIZE)
    x = tl.load(theta + client * dim + offset + index, mask=index < size, other=0.0)
    if SIGNS:
        x *= hashed_signs(key, index)
    tl.store(work + client * pad + index, block_stages(x, SIZE, LOG))


@triton.jit
def _block_out(
    work, pad, key, scale, out, dim, offset, size, SIZE: tl.constexpr, LOG: tl.constexpr
):  # fmt: skip
    """out[client, layer] ← scale · signs · stages of work."""
    client, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    index = block * SIZE + tl.arange(0, SIZE)
    x = block_stages(tl.load(work + client * pad + index), SIZE, LOG) * scale
    tl.store(out + client * dim + offset + index, x * hashed_signs(key, index), mask=index < size)


@triton.jit
def _kept(x, index, positions, scale, sketched):
    """y = scale · x where a row was kept, stored as its entry of `sketched`; zero elsewhere."""
    entry = tl.load(positions + index)
    y = x * scale
    tl.store(sketched + entry, y, mask=entry >= 0)
    return tl.where(entry >= 0, y, 0.0)


@triton.jit
def _split_in(
    theta, model, residual, dim, offset, size, key, positions, scale, back, work, pad, sketched, entries, unsent,
    WHOLE: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """unsent ← x = θ − w + e, and work[client, block] ← stages of (padded x · signs); where that is the WHOLE layer,
    all of `Sketch.split`."""
    client, index = tl.program_id(1).to(tl.int64), tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    place, inside, signs = client * dim + offset + index, index < size, hashed_signs(key, index)
    x = tl.load(theta + place, mask=inside, other=0.0) - tl.load(model + place, mask=inside, other=0.0)
    x += tl.load(residual + place, mask=inside, other=0.0)
    transformed = block_stages(x * signs, SIZE, LOG)
    if WHOLE:
        kept = _kept(transformed, index, positions, scale, sketched + client * entries)
        x -= block_stages(kept, SIZE, LOG) * back * signs
    else:
        tl.store(work + client * pad + index, transformed)
    tl.store(unsent + place, x, mask=inside)


@triton.jit
def _turn_kept(
    work, pad, stride, positions, scale, sketched, entries, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr
):
    """In place: the last stages, what of them is kept, and the same stages back."""
    client, index = tl.program_id(1).to(tl.int64), column_index(tl.program_id(0), stride, R, WIDE)
    own = work + client * pad
    x = column_stages(tl.load(own + index), R, LOG, WIDE)
    kept = _kept(x, index, positions, scale, sketched + client * entries)
    tl.store(own + index, column_stages(kept, R, LOG, WIDE))


@triton.jit
def _split_out(work, pad, key, back, unsent, dim, offset, size, SIZE: tl.constexpr, LOG: tl.constexpr):
    """unsent[client, layer] ← that − back · signs · stages of work."""
    client, index = tl.program_id(1).to(tl.int64), tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = block_stages(tl.load(work + client * pad + index), SIZE, LOG) * back
    place = unsent + client * dim + offset + index
    tl.store(place, tl.load(place, mask=index < size) - x * hashed_signs(key, index), mask=index < size)


@triton.jit
def _columns(work, pad, stride, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr):
    """In place: log2 R stages over entries `stride` apart."""
    index = column_index(tl.program_id(0), stride, R, WIDE)
    own = work + tl.program_id(1).to(tl.int64) * pad
    tl.store(own + index, column_stages(tl.load(own + index), R, LOG, WIDE))


def log2(value: int) -> int:
    return value.bit_length() - 1


def warps(size: int) -> int:
    return max(1, min(8, size // 512))


def column_passes(pad: int) -> list[tuple[int, int]]:
    """(stride, radix) of the passes after the block pass, in the order of stages, as even as they come."""
    bits = log2(pad) - log2(BLOCK)
    if bits <= 0:
        return []
    count = -(-bits // log2(RADIX))
    passes: list[tuple[int, int]] = []
    stride = BLOCK
    for number in range(count):
        share = -(-bits // (count - number))
        passes.append((stride, 1 << share))
        stride <<= share
        bits -= share
    return passes


def columns_at_once(radix: int) -> int:
    return min(COLUMNS, TILE // radix)


def run_columns(work: Tensor, stride: int, radix: int) -> None:
    """One column pass over `[clients, pad]`, in place."""
    clients, pad = work.shape
    wide = columns_at_once(radix)
    grid = (pad // (wide * radix), clients)
    _columns[grid](work, pad, stride, R=radix, LOG=log2(radix), WIDE=wide, num_warps=4)


def enter(theta: Tensor, offset: int, size: int, pad: int, key: Tensor | None) -> Tensor:
    """Pad, flip signs and do the block pass: `[clients, pad]`."""
    work = torch.empty(len(theta), pad, device=theta.device, dtype=torch.float32)
    block = min(pad, BLOCK)
    grid = (pad // block, len(theta))
    _block_in[grid](
        theta, theta.stride(0), offset, size, theta if key is None else key, work, pad,
        SIGNS=key is not None, SIZE=block, LOG=log2(block), num_warps=warps(block),
    )  # fmt: skip
    return work


def leave(work: Tensor, out: Tensor, offset: int, size: int, key: Tensor, scale: float) -> None:
    """out[:, offset : offset + size] ← scale · Pᵀ D of the block pass over `work`."""
    clients, pad = work.shape
    block = min(pad, BLOCK)
    grid = (pad // block, clients)
    _block_out[grid](
        work, pad, key, scale, out, out.stride(0), offset, size, SIZE=block, LOG=log2(block), num_warps=warps(block)
    )
