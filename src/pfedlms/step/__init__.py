"""What a local step does besides the model: the loss with its slope, clipping, and the step of SGD or AdamW."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedlms.backend import backend_of
from pfedlms.step import cpu
from pfedlms.step.cpu import BETAS, EPSILON, NO_DIVISION_BY_ZERO

Rate = float | Tensor
"""η: a number, or one on the device, so that recorded steps can be replayed with another."""


def sample_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample: `[clients, batch, …, classes]` and `[clients, batch, …]` → `[clients, batch]`, the
    mean over the positions of a sample that has several."""
    each = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)
    return each if each.ndim == 2 else each.flatten(2).mean(dim=2)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of every client, `[clients]`, and its gradient at the outputs, `[clients, batch, …, classes]`;
    with several positions in a sample, the mean over all positions of all samples."""
    given = outputs.detach()
    if labels.ndim > 2:
        losses, slope = cross_entropy(given.flatten(1, -2), labels.flatten(1))
        return losses, slope.view_as(given)
    if backend_of(given) == "gpu":
        from pfedlms.step import gpu

        if gpu.fits(given):
            return gpu.cross_entropy(given, labels)
    # By hand, because for a few classes autograd takes longer than the arithmetic; the operations are the same.
    logs, places = torch.log_softmax(given, dim=-1), labels.unsqueeze(-1)
    each = 1 / labels.shape[1]
    slope = logs.exp().mul_(each).scatter_add_(-1, places, logs.new_full((), -each).expand(places.shape))
    return -logs.gather(-1, places).squeeze(-1).mean(dim=1), slope


def sgd_step_(
    params: Tensor, gradient: Tensor, extra: Tensor | None, buffer: Tensor, rate: Rate, momentum: float, decay: float
) -> None:
    """In place θ ← θ − η b,  b ← β b + g,  g = gradient + extra + μ θ: all `[clients, dim]`; without momentum b is g
    and `buffer` stays. `gradient` is consumed."""
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


def kept_numbers(dim: int, optimizer: str, momentum: float) -> int:
    """How many numbers a client keeps between steps for a model of `dim`: momentum, or the state of AdamW."""
    return 2 * dim + 1 if optimizer == "adamw" else dim if momentum else 0


def adamw_step_(params: Tensor, gradient: Tensor, extra: Tensor | None, kept: Tensor, rate: Rate, decay: float) -> None:
    """In place, with g = gradient + extra and t the steps taken, this one included:

        m ← β₁ m + (1 − β₁) g      v ← β₂ v + (1 − β₂) g²
        θ ← (1 − η μ) θ − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)

    β = 0.9, 0.999 and ε = 1e-8; `kept: [clients, 2 dim + 1]` holds m, v and t of each client. `gradient` is consumed.
    Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
    """
    if backend_of(params) == "cpu":
        return cpu.adamw_step_(params, gradient, extra, kept, float(rate), decay)
    dim, (first, second) = params.shape[1], BETAS
    mean, square, steps = kept[:, :dim], kept[:, dim : 2 * dim], kept[:, 2 * dim :]
    if extra is not None:
        gradient += extra
    steps += 1
    mean.mul_(first).add_(gradient, alpha=1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    # Powers in float64: 1 − β₂ᵗ is a small difference at first.
    count = steps.double()
    size, root = (rate / (1 - first**count)).to(params.dtype), (1 - second**count).sqrt().to(params.dtype)
    params.mul_(1 - rate * decay)
    params.sub_(size * mean / (square.sqrt() / root + EPSILON))
    return None


def clip_(gradient: Tensor, extra: Tensor | None, largest: float) -> None:
    """In place g ← g · min(1, largest / (‖g‖ + 1e-6)), g = gradient + extra, for each client of `[clients, dim]`: what
    `torch.nn.utils.clip_grad_norm_` does to one model. Norms are summed in float64."""
    if backend_of(gradient) == "cpu":
        return cpu.clip_(gradient, extra, largest)
    if extra is not None:
        gradient += extra
    norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True, dtype=torch.float64)
    gradient *= (largest / (norms + NO_DIVISION_BY_ZERO)).clamp(max=1).to(gradient.dtype)
    return None
