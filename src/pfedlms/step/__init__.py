"""The parts of a local step besides the model: the loss and its gradient, clipping, and the step of SGD or AdamW."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedlms.backend import backend_of
from pfedlms.step import cpu
from pfedlms.step.cpu import BETAS, EPSILON, NO_DIVISION_BY_ZERO

Rate = float | Tensor
"""η: a number, or a tensor on the device, so that recorded steps can be replayed with another rate."""


def sample_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample, or of each of its positions: `[clients, batch, …, classes]` and `[clients, batch,
    …]` → `[clients, batch, …]`."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of every client, `[clients]`, and its gradient with respect to the outputs, `[clients, batch,
    …, classes]`. If samples have several positions, the mean is over all positions of all samples."""
    outputs = outputs.detach()
    if labels.ndim > 2:
        losses, slope = cross_entropy(outputs.flatten(1, -2), labels.flatten(1))
        return losses, slope.view_as(outputs)
    if backend_of(outputs) == "gpu":
        from pfedlms.step import gpu

        if gpu.fits(outputs):
            return gpu.cross_entropy(outputs, labels)
    # Without autograd, which takes longer than the arithmetic of a few classes; the operations are the same.
    logs, index = torch.log_softmax(outputs, dim=-1), labels.unsqueeze(-1)
    weight = 1 / labels.shape[1]
    slope = logs.exp().mul_(weight).scatter_add_(-1, index, logs.new_full((), -weight).expand(index.shape))
    return -logs.gather(-1, index).squeeze(-1).mean(dim=1), slope


def sgd_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: Rate, momentum: float, decay: float
) -> None:
    """In place θ ← θ − η b,  b ← β b + g,  g = gradient + extra + μ θ: all `[clients, dim]`. Without momentum b is g,
    and `buffer` is not used. `gradient` is overwritten."""
    where = backend_of(params)
    if where == "cpu":
        return cpu.sgd_step_(params, gradient, extra, buffer, float(rate), momentum, decay)
    if where == "gpu":
        from pfedlms.step import gpu

        return gpu.sgd_step_(params, gradient, extra, buffer, rate, momentum, decay)
    if extra is not None:
        gradient += extra
    if decay:
        gradient.add_(params, alpha=decay)
    if momentum:
        gradient = buffer.mul_(momentum).add_(gradient)
    if isinstance(rate, Tensor):
        params.sub_(gradient * rate)
    else:
        params.sub_(gradient, alpha=rate)
    return None


def optimizer_size(dim: int, optimizer: str, momentum: float) -> int:
    """Size of a client's optimizer state for a model of `dim` parameters: momentum, or the moments of AdamW."""
    return 2 * dim + 1 if optimizer == "adamw" else dim if momentum else 0


def adamw_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, state: Tensor, rate: Rate, decay: float
) -> None:
    """In place, with g = gradient + extra and t the steps taken, this one included:

        m ← β₁ m + (1 − β₁) g      v ← β₂ v + (1 − β₂) g²
        θ ← (1 − η μ) θ − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    β = 0.9, 0.999 and ε = 1e-8; `state: [clients, 2 dim + 1]` has m, v and t of each client. `gradient` is overwritten.
    Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """
    if backend_of(params) == "cpu":
        return cpu.adamw_step_(params, gradient, extra, state, float(rate), decay)
    dim, (first, second) = params.shape[1], BETAS
    mean, square, steps = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    if extra is not None:
        gradient += extra
    steps += 1
    mean.mul_(first).add_(gradient, alpha=1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    # Powers in float64, because 1 − β₂ᵗ is small at first.
    count = steps.double()
    size, root = (rate / (1 - first**count)).to(params.dtype), (1 - second**count).sqrt().to(params.dtype)
    params.mul_(1 - rate * decay)
    params.sub_(size * mean / (square.sqrt() / root + EPSILON))
    return None


def clip_(gradient: Tensor, extra: Tensor | None, largest: float) -> None:
    """In place g ← g · min(1, largest / (‖g‖ + 1e-6)), g = gradient + extra, for each client of `[clients, dim]`, as
    `torch.nn.utils.clip_grad_norm_` does for one model. Norms are summed in float64."""
    if backend_of(gradient) == "cpu":
        return cpu.clip_(gradient, extra, largest)
    if extra is not None:
        gradient += extra
    norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True, dtype=torch.float64)
    gradient *= (largest / (norms + NO_DIVISION_BY_ZERO)).clamp(max=1).to(gradient.dtype)
    return None
