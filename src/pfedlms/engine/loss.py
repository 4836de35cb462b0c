"""The task's loss, and its gradient at the outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedlms.kernels import triton_kernels


def sample_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample: `[clients, batch, classes]` and `[clients, batch]` → `[clients, batch]`."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def cross_entropy(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of every client, `[clients]`, and its gradient at the outputs, `[clients, batch, classes]`."""
    given = outputs.detach()
    if given.is_cuda and (kernels := triton_kernels("engine.triton_kernels")) is not None and kernels.fits(given):
        both: tuple[Tensor, Tensor] = kernels.cross_entropy(given, labels)
        return both
    # By hand, because autograd's way takes longer than the arithmetic for a few classes; the operations are its own.
    logs, places = torch.log_softmax(given, dim=-1), labels.unsqueeze(-1)
    each = 1 / labels.shape[1]
    slope = logs.exp().mul_(each).scatter_add_(-1, places, logs.new_full((), -each).expand(places.shape))
    return -logs.gather(-1, places).squeeze(-1).mean(dim=1), slope
