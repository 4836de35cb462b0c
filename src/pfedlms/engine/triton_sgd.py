"""`sgd.sgd_step` for GPUs: one pass over memory instead of one for each term."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _step(
    theta_in, grad, pull, velocity_in, velocity_out, theta_out, count, rate, momentum, decay,
    PULLED: tl.constexpr, MOVING: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    theta = tl.load(theta_in + index, mask=inside)
    g = tl.load(grad + index, mask=inside)
    if PULLED:
        g += tl.load(pull + index, mask=inside)
    g += decay * theta
    if MOVING:
        g += momentum * tl.load(velocity_in + index, mask=inside)
        tl.store(velocity_out + index, g, mask=inside)
    tl.store(theta_out + index, theta - rate * g, mask=inside)


def step(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: float, momentum: float, decay: float
) -> tuple[Tensor, Tensor]:
    """See `sgd.sgd_step`."""
    params, gradient = params.contiguous(), gradient.contiguous()
    out, new = torch.empty_like(params), torch.empty_like(buffer)
    grid = (triton.cdiv(params.numel(), BLOCK),)
    _step[grid](
        params, gradient, gradient if extra is None else extra, buffer, new, out, params.numel(), rate, momentum, decay,
        PULLED=extra is not None, MOVING=momentum > 0, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return out, new if momentum > 0 else buffer
