"""GPU kernels of the parts of a local step besides the model: one pass over memory instead of one for each term."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
LOSS_TILE = 1 << 14


@triton.jit
def _step(
    thetas, grad, pull, velocity, count, rate, momentum, decay,
    PULLED: tl.constexpr, MOVING: tl.constexpr, LOADED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    theta = tl.load(thetas + index, mask=inside)
    g = tl.load(grad + index, mask=inside)
    if PULLED:
        g += tl.load(pull + index, mask=inside)
    g += decay * theta
    if MOVING:
        g += momentum * tl.load(velocity + index, mask=inside)
        tl.store(velocity + index, g, mask=inside)
    if LOADED:
        tl.store(thetas + index, theta - tl.load(rate) * g, mask=inside)
    else:
        tl.store(thetas + index, theta - rate * g, mask=inside)


def sgd_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: float | Tensor,
    momentum: float, decay: float,
) -> None:  # fmt: skip
    grid = (triton.cdiv(params.numel(), BLOCK),)
    _step[grid](
        params, gradient, gradient if extra is None else extra, buffer, params.numel(), rate, momentum, decay,
        PULLED=extra is not None, MOVING=momentum > 0, LOADED=isinstance(rate, Tensor), SIZE=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _cross_entropy(
    outputs, labels, losses, slopes, batch, classes, BATCH: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """One program per client; it has all outputs of the client in registers."""
    client = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BATCH), tl.arange(0, CLASSES)
    inside = (row < batch)[:, None] & (column < classes)[None, :]
    place = client * batch * classes + row[:, None] * classes + column[None, :]
    z = tl.load(outputs + place, mask=inside, other=-float("inf")).to(tl.float32)
    z = tl.where((row < batch)[:, None], z, tl.where(column == 0, 0.0, -float("inf"))[None, :])  # a row of no sample
    z = z - tl.max(z, axis=1)[:, None]
    powers = tl.exp(z)
    sums = tl.sum(powers, axis=1)
    label = tl.load(labels + client * batch + row, mask=row < batch, other=-1)
    chosen = column[None, :] == label[:, None]
    loss = tl.log(sums) - tl.sum(tl.where(chosen, z, 0.0), axis=1)
    tl.store(losses + client, tl.sum(tl.where(row < batch, loss, 0.0), axis=0) / batch)
    slope = (powers / sums[:, None] - tl.where(chosen, 1.0, 0.0)) / batch
    tl.store(slopes + place, slope.to(slopes.dtype.element_ty), mask=inside)


def fits(outputs: Tensor) -> bool:
    """Whether one program can hold a client's outputs `[clients, batch, classes]`."""
    return bool(triton.next_power_of_2(outputs.shape[1]) * triton.next_power_of_2(outputs.shape[2]) <= LOSS_TILE)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    clients, batch, classes = outputs.shape
    losses = torch.empty(clients, device=outputs.device, dtype=torch.float32)
    slopes = torch.empty(outputs.shape, device=outputs.device, dtype=outputs.dtype)
    tile = (triton.next_power_of_2(batch), triton.next_power_of_2(classes))
    _cross_entropy[(clients,)](
        outputs.contiguous(), labels.contiguous(), losses, slopes, batch, classes, BATCH=tile[0], CLASSES=tile[1],
        num_warps=4 if tile[0] * tile[1] <= 4096 else 8,
    )  # fmt: skip
    return losses, slopes
