"""A custom loss or metric: a function of one client's outputs and targets, applied to all clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from pfedlms.errors import UsageError, reason

PerSample = Callable[[Tensor, Tensor], Tensor]
"""From outputs `[batch, …]` and targets `[batch, …]` of one client to one number per sample, `[batch]`. Several numbers
per sample, in the shape of outputs or targets, are averaged."""


Metric = PerSample | tuple[str, PerSample]
"""The same, or with the name it has in tables and plots."""


class OverClients:
    """`function` on outputs and targets `[clients, batch, …]`: `[clients, batch]`."""

    def __init__(self, function: PerSample, stacks: bool, called: str = "") -> None:
        self._function, self._called = function, called
        self.stacks = stacks
        """Whether `torch.func.vmap` takes it; otherwise it is called for one client after another."""

    @property
    def name(self) -> str:
        """As it was given, or the function's own; "metric" for one that has none, such as a lambda."""
        function = self._function.func if isinstance(self._function, partial) else self._function
        found: str = self._called or getattr(function, "__name__", type(function).__name__)
        return found if found.isidentifier() or self._called else "metric"

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
    called = ""
    if name == "metric" and isinstance(function, tuple) and len(function) == 2 and isinstance(function[0], str):
        called, function = function
    if not callable(function):
        or_named = ", or a pair (name, function)" * (name == "metric")
        raise UsageError(
            f"{name}: got {function!r}, expected a function of outputs and targets that gives one number per sample"
            f"{or_named}"
        )
    given = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}, {targets.dtype}"
    minimised = name == "loss"
    tried = outputs.detach().requires_grad_(minimised)
    try:
        with torch.enable_grad():
            each = function(tried.clone(), targets)  # a copy, so that it may write into it
    except Exception as error:  # it is the user's own and may raise anything
        raise UsageError(f"{name}: fails on {given} ({reason(error)}){_remedy(function, tried, targets)}") from error
    if not isinstance(each, Tensor):
        why = ", whose gradients local steps need" * minimised
        raise UsageError(
            f"{name}: got {type(each).__name__}, expected a tensor, one number per sample; use nothing but torch{why}"
        )
    got = f"shape {tuple(each.shape)}"
    allowed = ((), tuple(outputs.shape[1:]), tuple(targets.shape[1:]))
    if each.shape[:1] != outputs.shape[:1] or tuple(each.shape[1:]) not in allowed:
        scalar = each.ndim == 0
        remedy = "leave the mean over samples out (reduction='none')" if scalar else "give outputs the targets' shape"
        raise UsageError(f"{name}: got {got} for {given}, expected one number per sample, ({len(outputs)},); {remedy}")
    if minimised and not each.requires_grad:
        raise UsageError(
            "loss: got numbers without a gradient, expected a function of the outputs that autograd can follow; leave "
            "detach(), item(), NumPy, argmax and the like out of it"
        )
    stacked = OverClients(function, stacks=True, called=called)
    try:
        with torch.random.fork_rng(devices=[outputs.device] if outputs.is_cuda else []):
            stacked(torch.stack([outputs, outputs]), torch.stack([targets, targets]))
    except Exception:  # branches on values, operations without a rule: whatever vmap does not take
        return OverClients(function, stacks=False, called=called)
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
