"""CPU kernels of steps and clipping: one pass over a client's parameters instead of one for each term. (For the loss
torch is as fast.)"""

from __future__ import annotations

from math import sqrt

import numpy as np
from torch import Tensor

from pfedlms.backend import compiled, run_kernel
from pfedlms.checks import Array

BETAS = (0.9, 0.999)  # of AdamW
EPSILON = 1e-8
NO_DIVISION_BY_ZERO = 1e-6  # added to the norm by which a gradient is clipped
_LANES = 16  # partial sums of a norm, so that additions do not wait for each other


def sgd_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: float, momentum: float, decay: float
) -> None:
    second = gradient if extra is None else extra
    run_kernel(
        _steps, len(params), params.shape[1], params.numpy(), gradient.numpy(), second.numpy(), extra is not None,
        buffer.numpy(), rate, momentum, decay,
    )  # fmt: skip


@compiled()
def _steps(
    first: int, last: int, params: Array, gradient: Array, extra: Array, has_extra: bool, buffer: Array,
    rate: float, momentum: float, decay: float,
) -> None:  # fmt: skip
    for client in range(first, last):
        _step(params[client], gradient[client], extra[client], has_extra, buffer[client], rate, momentum, decay)


@compiled()
def _step(
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


def adamw_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, state: Tensor, rate: float, decay: float
) -> None:
    second = gradient if extra is None else extra
    run_kernel(
        _adamw_steps, len(params), 2 * params.shape[1], params.numpy(), gradient.numpy(), second.numpy(),
        extra is not None, state.numpy(), rate, decay,
    )  # fmt: skip


@compiled()
def _adamw_steps(
    first: int, last: int, params: Array, gradient: Array, extra: Array, has_extra: bool, state: Array,
    rate: float, decay: float,
) -> None:  # fmt: skip
    dim = params.shape[1]
    for client in range(first, last):
        own = state[client]
        own[2 * dim] += 1
        count = float(own[2 * dim])
        size, root = rate / (1 - BETAS[0] ** count), sqrt(1 - BETAS[1] ** count)
        moments = own[:dim], own[dim : 2 * dim]
        _adamw_step(params[client], gradient[client], extra[client], has_extra, *moments, size, root, 1 - rate * decay)


@compiled()
def _adamw_step(
    theta: Array, gradient: Array, extra: Array, has_extra: bool, mean: Array, square: Array,
    size: float, root: float, shrink: float,
) -> None:  # fmt: skip
    kind = theta.dtype.type
    beta, gamma, less, fewer = kind(BETAS[0]), kind(BETAS[1]), kind(1 - BETAS[0]), kind(1 - BETAS[1])
    step, by, keep, epsilon = kind(size), kind(root), kind(shrink), kind(EPSILON)
    for i in range(len(theta)):
        g = gradient[i]
        if has_extra:
            g += extra[i]
        m = beta * mean[i] + less * g
        v = gamma * square[i] + fewer * g * g
        mean[i] = m
        square[i] = v
        theta[i] = keep * theta[i] - step * m / (np.sqrt(v) / by + epsilon)


def clip_(gradient: Tensor, extra: Tensor | None, largest: float) -> None:
    second = gradient if extra is None else extra
    run_kernel(
        _clip, len(gradient), 2 * gradient.shape[1], gradient.numpy(), second.numpy(), extra is not None, largest
    )


@compiled()
def _clip(first: int, last: int, gradient: Array, extra: Array, has_extra: bool, largest: float) -> None:
    for client in range(first, last):
        own = gradient[client]
        if has_extra:
            own += extra[client]
        factor = largest / (sqrt(_squared(own)) + NO_DIVISION_BY_ZERO)
        if factor < 1:
            own *= own.dtype.type(factor)


@compiled()
def _squared(values: Array) -> float:
    """Σ x² in float64, in an order that depends on the length alone."""
    sums, end = np.zeros(_LANES), len(values) - len(values) % _LANES
    for start in range(0, end, _LANES):
        for lane in range(_LANES):
            x = float(values[start + lane])
            sums[lane] += x * x
    total = 0.0
    for lane in range(_LANES):
        total += sums[lane]
    for i in range(end, len(values)):
        x = float(values[i])
        total += x * x
    return total
