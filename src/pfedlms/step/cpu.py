"""The SGD step on a CPU: one pass over a client's parameters instead of one for each term. (The loss is as fast in
torch.)"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import compiled, share

Array = NDArray[Any]


def sgd_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: float, momentum: float, decay: float
) -> None:
    second = gradient if extra is None else extra
    share(
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
