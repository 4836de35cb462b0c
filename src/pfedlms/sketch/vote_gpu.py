"""Triton kernels for a vote on signs of a sketch: signs and root mean squares for the client's message, and the step
for the server's packed votes. The transform's passes are those of `sketch.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from pfedlms.sketch.gpu import (
    BLOCK,
    Layer,
    block_stages,
    column_index,
    column_passes,
    column_stages,
    columns_at_once,
    hashed_signs,
    layers_of,
    log2,
    places_on,
    run_columns,
    warps,
)

if TYPE_CHECKING:
    from pfedlms.sketch import Sketch

SQUARES = 4096
PACKED = 512


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
    block = min(pad, BLOCK)
    work = out.new_empty(1, pad if pad > block else 0)
    if pad > block:
        (stride, radix), *inner = reversed(column_passes(pad))
        wide = columns_at_once(radix)
        _votes_in[(pad // (wide * radix),)](signs, kept, work, stride, R=radix, LOG=log2(radix), WIDE=wide, num_warps=4)
        for each in inner:
            run_columns(work, *each)
    _step_out[(pad // block,)](
        signs, kept, work, key, factor, out, begin, size, WHOLE=pad == block, SIZE=block, LOG=log2(block),
        num_warps=warps(block),
    )  # fmt: skip


@triton.jit
def _signs_and_rms(
    sketched,
    entries,
    places,
    layers,
    signs,
    width,
    sizes,
    MOST: tl.constexpr,
    SIZE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The root mean square of one layer of one client's sketch, in float64, or `BYTES` bytes of its signs."""
    part, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own = sketched + client * entries
    if part < layers:
        start, stop = tl.load(places + 3 * part), tl.load(places + 3 * part + 1)
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
def _votes_in(signs, kept, work, stride, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr):
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
