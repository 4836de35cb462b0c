"""What a local step does besides the model: the loss with its slope, and the SGD step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import compiled, shares_work, triton_kernels

Array = NDArray[Any]


def sample_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample: `[clients, batch, classes]` and `[clients, batch]` → `[clients, batch]`."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of every client, `[clients]`, and its gradient at the outputs, `[clients, batch, classes]`."""
    given = outputs.detach()
    if given.is_cuda and (kernels := triton_kernels("step.gpu")) is not None and kernels.fits(given):
        both: tuple[Tensor, Tensor] = kernels.cross_entropy(given, labels)
        return both
    # By hand, because autograd's way takes longer than the arithmetic for a few classes; the operations are its own.
    logs, places = torch.log_softmax(given, dim=-1), labels.unsqueeze(-1)
    each = 1 / labels.shape[1]
    slope = logs.exp().mul_(each).scatter_add_(-1, places, logs.new_full((), -each).expand(places.shape))
    return -logs.gather(-1, places).squeeze(-1).mean(dim=1), slope


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
    if params.is_cuda and params.dtype == torch.float32 and (kernels := triton_kernels("step.gpu")) is not None:
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
