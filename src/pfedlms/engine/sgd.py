"""One SGD step for many models, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.kernels import compiled

Array = NDArray[Any]


def sgd_step(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: float, momentum: float, decay: float
) -> tuple[Tensor, Tensor]:
    """θ ← θ − η b,  b ← β b + g,  g = gradient + extra + μ θ: all `[clients, dim]`; without momentum b is g and
    `buffer` stays.

    Returns the new models and the new momentum buffer; nothing is changed in place but `gradient`, which is consumed.
    """
    if params.device.type == "cpu" and params.dtype == torch.float32:
        out = torch.empty_like(params)
        new = torch.empty_like(buffer)
        second = gradient if extra is None else extra
        _step(
            params.numpy(), gradient.numpy(), second.numpy(), extra is not None, buffer.numpy(), new.numpy(),
            out.numpy(), rate, momentum, decay,
        )  # fmt: skip
        return out, new
    if params.is_cuda and params.dtype == torch.float32 and (kernels := gpu_kernels()) is not None:
        stepped: tuple[Tensor, Tensor] = kernels.step(params, gradient, extra, buffer, rate, momentum, decay)
        return stepped
    if extra is not None:
        gradient += extra
    if decay:
        gradient.add_(params, alpha=decay)
    if momentum:
        gradient = buffer = buffer * momentum + gradient
    return torch.add(params, gradient, alpha=-rate), buffer


def gpu_kernels() -> Any:
    """The Triton version, or None where Triton is not installed."""
    try:
        from pfedlms.engine import triton_kernels
    except ImportError:
        return None
    return triton_kernels


@compiled(parallel=True)
def _step(
    params: Array, gradient: Array, extra: Array, has_extra: bool, buffer: Array, new: Array, out: Array,
    rate: float, momentum: float, decay: float,
) -> None:  # fmt: skip
    kind = params.dtype.type
    eta, beta, mu = kind(rate), kind(momentum), kind(decay)
    for client in prange(len(params)):
        for i in range(params.shape[1]):
            g = gradient[client, i]
            if has_extra:
                g += extra[client, i]
            g += mu * params[client, i]
            if momentum > 0:
                g += beta * buffer[client, i]
                new[client, i] = g
            out[client, i] = params[client, i] - eta * g
