"""Triton kernels of the sketch and its adjoint, for GPUs (and, slowly, for Triton's interpreter).

A padded layer of N = 2^k entries is seen as a matrix of N / B rows of B = 2^12 contiguous entries:

    block pass     one program computes the stages 1, 2, …, B/2 of one row of B entries in registers
    column pass    one program computes log2 R stages of R ≤ 64 entries that lie a stride apart, for many columns

So N ≤ 2^12 takes one pass over memory, N ≤ 2^18 two and N ≤ 2^24 three. Stages run in the order of `hadamard`, each as
(a + b, a − b), so results have the bits of the CPU. Signs are hashed where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

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
SQUARES = 4096
PACKED = 512


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
        work = _transformed(params, layer.begin, layer.size, layer.pad, layer.key)
        parts.append(work[:, layer.rows] * layer.scale)
    return torch.cat(parts, dim=1)


def adjoint(sketch: Sketch, sketched: Tensor, scaled: bool = True) -> Tensor:
    out = sketched.new_empty(len(sketched), sketch.dim)
    for layer in layers_of(sketch):
        work = sketched.new_zeros(len(sketched), layer.pad)
        work[:, layer.rows] = sketched[:, layer.start : layer.start + len(layer.rows)]
        for each in reversed(column_passes(layer.pad)):
            run_columns(plain_columns, work, *each)
        leave(work, out, layer, layer.scale if scaled else 1.0)
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
    (clients, dim), entries, whole = unsent.shape, sketched.shape[1], pad <= BLOCK
    work = unsent.new_empty(clients, 0 if whole else pad)
    run_blocks(
        _split_in, clients, pad, *given, dim, begin, size, key, positions, scale, back, work, pad, sketched, entries,
        unsent, WHOLE=whole,
    )  # fmt: skip
    if not whole:
        run_there_and_back(_turn_kept, work, positions, scale, sketched, entries)
        run_blocks(_split_out, clients, pad, work, pad, key, back, unsent, dim, begin, size)


def fwht(values: Tensor) -> Tensor:
    """H x along the last axis of `[rows, N]` float32, N ≥ 2 a power of two; the same bits as `fwht_reference`."""
    return _transformed(values, 0, values.shape[1], values.shape[1], None)


def _transformed(theta: Tensor, begin: int, size: int, pad: int, key: Tensor | None) -> Tensor:
    work = enter(theta, begin, size, pad, key)
    for each in column_passes(pad):
        run_columns(plain_columns, work, *each)
    return work


def signs_and_rms(sketch: Sketch, sketched: Tensor) -> tuple[Tensor, Tensor]:
    """`Sketch.signs_and_rms`: one launch; some programs compute the rms of a layer, the others pack signs."""
    given, (clients, entries) = sketched.contiguous(), sketched.shape
    layers, width = len(sketch.shape.places), -(-entries // 8)
    signs = torch.empty(clients, width, dtype=torch.uint8, device=given.device)
    sizes = torch.empty(clients, layers, dtype=torch.float32, device=given.device)
    _signs_and_rms[(layers + triton.cdiv(width, PACKED), clients)](
        given, entries, places_on(sketch.shape, given.device), layers, signs, width, sizes,
        MOST=max(sketch.sizes), SIZE=SQUARES, BYTES=PACKED, num_warps=8,
    )  # fmt: skip
    return signs, sizes


@lru_cache(maxsize=16)
def places_on(shape: Shape, device: torch.device) -> Tensor:
    """`shape.table` on `device`."""
    return torch.from_numpy(shape.table).to(device)


def step(sketch: Sketch, signs: Tensor, factors: Sequence[float]) -> Tensor:
    """`Sketch.step`, with `signs: [⌈Σ m / 8⌉]` on the device and c of every layer."""
    out = torch.empty(sketch.dim, dtype=torch.float32, device=signs.device)
    everywhere = sketch.positions.split([place.pad for place in sketch.shape.places])
    for layer, own, factor in zip(layers_of(sketch), everywhere, factors, strict=True):
        if factor:
            _step_layer(layer, signs, own, factor, out)
        else:
            out[layer.begin : layer.begin + layer.size] = -0.0  # a kernel would make +0 of it
    return out


def _step_layer(layer: Layer, signs: Tensor, kept: Tensor, factor: float, out: Tensor) -> None:
    """One layer of `step`, with `kept: [pad]`, its part of `Sketch.positions`."""
    begin, size, pad, key, _, _, _ = layer
    whole = pad <= BLOCK
    work = out.new_empty(1, 0 if whole else pad)
    if not whole:
        last, *inner = reversed(column_passes(pad))
        run_columns(_votes_in, work, *last, signs, kept)
        for each in inner:
            run_columns(plain_columns, work, *each)
    run_blocks(_step_out, 1, pad, signs, kept, work, key, factor, out, begin, size, WHOLE=whole)


def kept_rows(shape: Shape, constants: Tensor) -> Tensor:
    """The rows kept of all layers, `[Σ m]`; `constants` as in `sketch.kept_rows`."""
    layers, largest = len(shape.places), max(place.stop - place.start for place in shape.places)
    rows = torch.empty(shape.places[-1].stop, device=constants.device, dtype=torch.int64)
    _kept_rows[(triton.cdiv(largest, ROWS), layers)](
        constants, layers, rows, ROUNDS=(len(constants) - 3) // 2, SIZE=ROWS, num_warps=4
    )
    return rows


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
def plain_columns(work, pad, stride, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr):
    """In place: log2 R stages over entries `stride` apart."""
    index = column_index(tl.program_id(0), stride, R, WIDE)
    own = work + tl.program_id(1).to(tl.int64) * pad
    tl.store(own + index, column_stages(tl.load(own + index), R, LOG, WIDE))


@triton.jit
def _signs_and_rms(
    sketched, entries, places, layers, signs, width, sizes,
    MOST: tl.constexpr, SIZE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The root mean square of one layer of one client's sketch, in float64, or `BYTES` bytes of its signs."""
    part, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = sketched + client * entries
    if part < layers:
        start, stop = tl.load(places + 5 * part + 3), tl.load(places + 5 * part + 4)
        total = tl.zeros((SIZE,), tl.float64)
        for at in range(0, MOST, SIZE):
            index = start + at + tl.arange(0, SIZE)
            y = tl.load(own + index, mask=index < stop, other=0.0).to(tl.float64)
            total += y * y
        mean = tl.sum(total) / (stop - start).to(tl.float64)
        tl.store(sizes + client * layers + part, tl.sqrt(mean).to(tl.float32))
    else:
        byte = (part - layers) * BYTES + tl.arange(0, BYTES)
        bit = tl.arange(0, 8)[None, :]
        index = byte[:, None] * 8 + bit
        y = tl.load(own + index, mask=index < entries, other=-1.0)
        packed = tl.sum((y >= 0).to(tl.int32) << bit, axis=1)
        tl.store(signs + client * width + byte, packed.to(tl.uint8), mask=byte < width)


@triton.jit
def _votes(signs, kept, index):
    """±1 of the packed signs at the rows kept, zero elsewhere."""
    entry = tl.load(kept + index)
    packed = tl.load(signs + (entry >> 3), mask=entry >= 0, other=0).to(tl.int32)
    return tl.where(entry >= 0, 2.0 * ((packed >> (entry & 7)) & 1).to(tl.float32) - 1.0, 0.0)


@triton.jit
def _votes_in(work, pad, stride, signs, kept, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr):
    """work ← the last stages of the votes, which are the first on the way back."""
    index = column_index(tl.program_id(0), stride, R, WIDE)
    tl.store(work + index, column_stages(_votes(signs, kept, index), R, LOG, WIDE))


@triton.jit
def _step_out(
    signs, kept, work, key, factor, out, offset, size, WHOLE: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr
):
    """out[layer] ← factor · D of the stages of work, or of the votes where that is the WHOLE layer. Whole numbers but
    for the factor: one rounding."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = _votes(signs, kept, index) if WHOLE else tl.load(work + index)
    x = block_stages(x, SIZE, LOG) * hashed_signs(key, index)
    tl.store(out + offset + index, x * factor, mask=index < size)


def log2(value: int) -> int:
    return value.bit_length() - 1


def column_passes(pad: int) -> list[tuple[int, int]]:
    """(stride, radix) of the column passes in the order of stages; their radices are as equal as possible."""
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


def run_blocks(kernel: Any, clients: int, pad: int, *given: Any, **constants: Any) -> None:
    """A block pass over one layer of all clients."""
    block = min(pad, BLOCK)
    shape = {"SIZE": block, "LOG": log2(block), "num_warps": max(1, min(8, block // 512))}
    kernel[(pad // block, clients)](*given, **constants, **shape)


def run_columns(kernel: Any, work: Tensor, stride: int, radix: int, *given: Any, **constants: Any) -> None:
    """One column pass over `work: [clients, pad]`, in place."""
    (clients, pad), wide = work.shape, min(COLUMNS, TILE // radix)
    shape = {"R": radix, "LOG": log2(radix), "WIDE": wide, "num_warps": 4}
    kernel[(pad // (wide * radix), clients)](work, pad, stride, *given, **constants, **shape)


def run_there_and_back(turn: Any, work: Tensor, *given: Any, **constants: Any) -> None:
    """All column passes forth and back. The last one forth and the first one back are one kernel, `turn`: between them
    every entry of y is in a register, where it computes with it."""
    *inner, last = column_passes(work.shape[1])
    for each in inner:
        run_columns(plain_columns, work, *each)
    run_columns(turn, work, *last, *given, **constants)
    for each in reversed(inner):
        run_columns(plain_columns, work, *each)


def enter(theta: Tensor, offset: int, size: int, pad: int, key: Tensor | None) -> Tensor:
    """Pad, flip signs and do the block pass: `[clients, pad]`."""
    work, flips = torch.empty(len(theta), pad, device=theta.device, dtype=torch.float32), key is not None
    given = theta, theta.stride(0), offset, size, key if flips else theta, work, pad
    run_blocks(_block_in, len(theta), pad, *given, SIGNS=flips)
    return work


def leave(work: Tensor, out: Tensor, layer: Layer, scale: float) -> None:
    """The layer's part of `out` ← scale · Pᵀ D of the block pass over `work`."""
    given = work, layer.pad, layer.key, scale, out, out.stride(0), layer.begin, layer.size
    run_blocks(_block_out, len(work), layer.pad, *given)
