"""A loss or a metric of somebody's own: a function of one client's outputs and targets, applied to all clients'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from pfedlms.errors import UsageError

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
        if each.ndim == 1:
            return each
        # Truth values and whole numbers have no mean in torch.
        return (each if each.is_floating_point() else each.float()).flatten(1).mean(dim=1)


def over_clients(name: str, function: Any, outputs: Tensor, targets: Tensor) -> OverClients:
    """`function`, called `name` in errors, tried on one client's `outputs: [batch, …]` and `targets: [batch, …]`."""
    if not callable(function):
        raise UsageError(
            f"{name}: got {function!r}, expected a function of outputs and targets that gives one number a sample"
        )
    given = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}, {targets.dtype}"
    try:
        with torch.enable_grad():
            each = function(outputs.detach().requires_grad_(name == "loss").clone(), targets)
    except Exception as error:  # it is the user's own and may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{name}: fails on {given} ({reason})") from error
    got = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
    allowed = ((), tuple(outputs.shape[1:]), tuple(targets.shape[1:]))
    if not isinstance(each, Tensor) or each.shape[:1] != outputs.shape[:1] or tuple(each.shape[1:]) not in allowed:
        scalar = isinstance(each, Tensor) and each.ndim == 0
        remedy = "leave the mean over samples out (reduction='none')" if scalar else "give outputs the targets' shape"
        raise UsageError(f"{name}: got {got} for {given}, expected one number a sample, ({len(outputs)},); {remedy}")
    if name == "loss" and not each.requires_grad:
        raise UsageError(
            f"loss: got {each.dtype} that no gradient flows back from, expected numbers computed from the outputs; "
            "leave detach(), argmax and comparisons out of it (a metric may have them)"
        )
    stacked = OverClients(function, stacks=True)
    try:
        with torch.random.fork_rng(devices=[outputs.device] if outputs.is_cuda else []):
            stacked(torch.stack([outputs, outputs]), torch.stack([targets, targets]))
    except Exception:  # branches on values, operations without a rule: whatever vmap does not take
        return OverClients(function, stacks=False)
    return stacked
