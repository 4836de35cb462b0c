"""One SGD step for many models, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.kernels import compiled, shares_work, triton_kernels

Array = NDArray[Any]


def sgd_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: float, momentum: float, decay: float
) -> None:
    """In place θ ← θ − η b,  b ← β b + g,  g = gradient + extra + μ θ: all `[clients, dim]`; without momentum b is g
    and `buffer` stays. `gradient` is consumed."""
    if params.device.type == "cpu" and params.dtype == torch.float32:
        second = gradient if extra is None else extra
        step = _step_shared if shares_work() else _step
        step(params.numpy(), gradient.numpy(), second.numpy(), extra is not None, buffer.numpy(), rate, momentum, decay)
        return
    if (
        params.is_cuda
        and params.dtype == torch.float32
        and (kernels := triton_kernels("engine.triton_kernels")) is not None
    ):
        kernels.step_(params, gradient, extra, buffer, rate, momentum, decay)
        return
    if extra is not None:
        gradient += extra
    if decay:
        gradient.add_(params, alpha=decay)
    if momentum:
        gradient = buffer.mul_(momentum).add_(gradient)
    params.sub_(gradient, alpha=rate)


@compiled()
def _step(
    params: Array, gradient: Array, extra: Array, has_extra: bool, buffer: Array,
    rate: float, momentum: float, decay: float,
) -> None:  # fmt: skip
    for client in range(len(params)):
        _step_one(params[client], gradient[client], extra[client], has_extra, buffer[client], rate, momentum, decay)


@compiled(parallel=True)
def _step_shared(
    params: Array, gradient: Array, extra: Array, has_extra: bool, buffer: Array,
    rate: float, momentum: float, decay: float,
) -> None:  # fmt: skip
    for client in prange(len(params)):
        _step_one(params[client], gradient[client], extra[client], has_extra, buffer[client], rate, momentum, decay)


@compiled()
def _step_one(
    theta: Array, gradient: Array, extra: Array, has_extra: bool, buffer: Array,
    rate: float, momentum: float, decay: float,
) -> None:  # fmt: skip
    kind = theta.dtype.type
    eta, beta, mu = kind(rate), kind(momentum), kind(decay)
    for i in range(len(theta)):
        g = gradient[i]
        if has_extra:
            g += extra[i]
        g += mu * theta[i]
        if momentum > 0:
            g += beta * buffer[i]
            buffer[i] = g
        theta[i] -= eta * g
