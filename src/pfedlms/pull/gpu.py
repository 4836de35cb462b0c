"""GPU kernels of the pull: sketch, slope and adjoint of a layer, with y and its slope in registers.

The consensus is stored by rows of H, so that nothing has to be gathered or scattered: q̃ at rows that are kept, −1 at
the others. The transform's passes are those of `sketch.gpu`."""

from __future__ import annotations

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
    column_stages,
    enter,
    hashed_signs,
    layers_of,
    leave,
    run_blocks,
    run_there_and_back,
)

if TYPE_CHECKING:
    from pfedlms.pull import Pull


def gradient(pull: Pull, params: Tensor) -> Tensor:
    params = params.contiguous()
    layers, out = list(layers_of(pull.sketch)), torch.empty_like(params)
    kept = pull.positions.split([layer.pad for layer in layers])
    thresholds, widths = (value.to(params.dtype).contiguous() for value in (pull.thresholds, pull.widths))
    for layer, own, tau, width in zip(layers, kept, thresholds, widths.unsqueeze(1), strict=True):
        _pull_layer(layer, params, own, tau, width, pull.strength, out)
    return out


def _pull_layer(
    layer: Layer, theta: Tensor, kept: Tensor, tau: Tensor, width: Tensor, strength: float, out: Tensor
) -> None:
    """out[:, layer] ← λ Φᵀ ∇_y R̃_ρ(Φθ), with `kept: [pad]`, `tau: [T]`, `width: [1]`."""
    begin, size, pad, key, _, _, scale = layer
    levels, clients, back = len(tau), len(theta), scale * strength
    if pad <= BLOCK:
        given = theta, theta.stride(0), begin, size, key, kept, tau, width, scale, back, out
        run_blocks(_pull_block, clients, pad, *given, T=levels)
    else:
        work = enter(theta, begin, size, pad, key)
        run_there_and_back(_turn_columns, work, kept, tau, width, scale, T=levels)
        leave(work, out, layer, back)


@triton.jit
def _slope(y, q, tau, width, T: tl.constexpr):
    """`penalty_slope` of one layer, zero where the row was not kept and where ρ is zero."""
    rho = tl.load(width)
    inverse = 1.0 / tl.where(rho > 0, rho, 1.0)
    total = T - 2.0 * q.to(tl.float32)
    for t in tl.static_range(T):
        step = (y - tl.load(tau + t)) * inverse
        total += tl.minimum(tl.maximum(step, -1.0), 1.0)
    return tl.where(rho > 0, tl.where(q >= 0, total / T, 0.0), 0.0)


@triton.jit
def _turn_columns(
    work, pad, stride, kept, tau, width, scale,
    T: tl.constexpr, R: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """In place: the last stages, y = scale · x, its slope, and the same stages back."""
    index = column_index(tl.program_id(0), stride, R, WIDE)
    own = work + tl.program_id(1).to(tl.int64) * pad
    y = column_stages(tl.load(own + index), R, LOG, WIDE) * scale
    slope = _slope(y, tl.load(kept + index), tau, width, T)
    tl.store(own + index, column_stages(slope, R, LOG, WIDE))


@triton.jit
def _pull_block(
    theta, dim, offset, size, key, kept, tau, width, scale, back, out,
    T: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """The whole pull of a layer that fits one block."""
    client = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, SIZE)
    signs = hashed_signs(key, index)
    x = tl.load(theta + client * dim + offset + index, mask=index < size, other=0.0) * signs
    slope = _slope(block_stages(x, SIZE, LOG) * scale, tl.load(kept + index), tau, width, T)
    x = block_stages(slope, SIZE, LOG) * back * signs
    tl.store(out + client * dim + offset + index, x, mask=index < size)
