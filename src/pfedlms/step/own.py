"""A loss or a metric of somebody's own: a function of one client's outputs and targets, applied to all clients'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from pfedlms.errors import UsageError, reason

PerSample = Callable[[Tensor, Tensor], Tensor]
"""Outputs `[batch, …]` and targets `[batch, …]` of one client to one number a sample, `[batch]`; of several numbers a
sample, in the shape of outputs or targets, the mean is taken."""


class OverClients:
    """`function` on outputs and targets `[clients, batch, …]`: `[clients, batch]`."""

    def __init__(self, function: PerSample, stacks: bool) -> None:
        self._function = function
        self.stacks = stacks
        """Whether `torch.func.vmap` takes it; otherwise clients go one after another."""

    @property
    def name(self) -> str:
        """Of the function, if it has one."""
        found: str = getattr(self._function, "__name__", type(self._function).__name__)
        return found if found.isidentifier() else "metric"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.stacks:
            return vmap(self._one, randomness="different")(outputs, targets)
        return torch.stack([self._one(*own) for own in zip(outputs, targets, strict=True)])

    def _one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = self._function(outputs, targets)
        return each.flatten(1).mean(dim=1) if each.ndim > 1 else each


def over_clients(name: str, function: Any, outputs: Tensor, targets: Tensor) -> OverClients:
    """`function`, called `name` in errors, tried on one client's `outputs: [batch, …]` and `targets: [batch, …]`."""
    if not callable(function):
        raise UsageError(
            f"{name}: got {function!r}, expected a function of outputs and targets that gives one number a sample"
        )
    given = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}, {targets.dtype}"
    minimised = name == "loss"
    tried = outputs.detach().requires_grad_(minimised)
    try:
        with torch.enable_grad():
            each = function(tried, targets)
    except Exception as error:  # it is the user's own and may raise anything
        raise UsageError(f"{name}: fails on {given} ({reason(error)}){_remedy(function, tried, targets)}") from error
    if not isinstance(each, Tensor):
        why = ", whose gradients local steps need" * minimised
        raise UsageError(
            f"{name}: got {type(each).__name__}, expected a tensor, one number a sample; use nothing but torch{why}"
        )
    got = f"shape {tuple(each.shape)}"
    allowed = ((), tuple(outputs.shape[1:]), tuple(targets.shape[1:]))
    if each.shape[:1] != outputs.shape[:1] or tuple(each.shape[1:]) not in allowed:
        scalar = each.ndim == 0
        remedy = "leave the mean over samples out (reduction='none')" if scalar else "give outputs the targets' shape"
        raise UsageError(f"{name}: got {got} for {given}, expected one number a sample, ({len(outputs)},); {remedy}")
    if minimised and not each.requires_grad:
        raise UsageError(
            "loss: got numbers without a gradient, expected a function of the outputs that autograd can follow; leave "
            "detach(), item(), NumPy, argmax and the like out of it"
        )
    stacked = OverClients(function, stacks=True)
    try:
        with torch.random.fork_rng(devices=[outputs.device] if outputs.is_cuda else []):
            stacked(torch.stack([outputs, outputs]), torch.stack([targets, targets]))
    except Exception:  # branches on values, operations without a rule: whatever vmap does not take
        return OverClients(function, stacks=False)
    return stacked


def _remedy(function: PerSample, outputs: Tensor, targets: Tensor) -> str:
    """Found by trying: many losses take targets of the outputs' own type alone."""
    if targets.is_floating_point():
        return ""
    try:
        function(outputs, targets.to(outputs.dtype))
    except Exception:
        return ""
    return "; it takes targets that are floats: give them as such, y.astype(np.float32), or use targets.float() in it"
