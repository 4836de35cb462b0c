"""What a local step does besides the model: the loss with its slope, and the SGD step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedlms.backend import backend_of
from pfedlms.step import cpu


def sample_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample: `[clients, batch, classes]` and `[clients, batch]` → `[clients, batch]`."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of every client, `[clients]`, and its gradient at the outputs, `[clients, batch, classes]`."""
    given = outputs.detach()
    if backend_of(given) == "gpu":
        from pfedlms.step import gpu

        if gpu.fits(given):
            return gpu.cross_entropy(given, labels)
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
    given, where = (params, gradient, extra, buffer, rate, momentum, decay), backend_of(params)
    if where == "cpu":
        return cpu.sgd_step_(*given)
    if where == "gpu":
        from pfedlms.step import gpu

        return gpu.sgd_step_(*given)
    if extra is not None:
        gradient += extra
    if decay:
        gradient.add_(params, alpha=decay)
    if momentum:
        gradient = buffer.mul_(momentum).add_(gradient)
    params.sub_(gradient, alpha=rate)
    return None
