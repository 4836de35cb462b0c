"""The user's own loss or metric: a function of one client's outputs and targets, applied to all clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from pfedlms import rng
from pfedlms.errors import UsageError, reason

PerSample = Callable[[Tensor, Tensor], Tensor]
"""A function of one client's outputs `[batch, …]` and targets `[batch, …]` that returns one number per sample,
`[batch]`, or several per sample, in the shape of outputs or targets, which are averaged."""

Metric = PerSample | tuple[str, PerSample]
"""Such a function, or a pair of its name in tables and plots, and the function."""


@dataclass(frozen=True)
class CustomFunction:
    """Applies `function` to outputs and targets `[clients, batch, …]`; returns `[clients, batch]`."""

    function: PerSample
    uses_vmap: bool
    """Whether it runs under `torch.func.vmap`; otherwise it is called for one client after another."""
    name: str
    """The name that the user gave, or the function's own; "metric" for a function without one, such as a lambda."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.uses_vmap:
            return vmap(self._apply, randomness="different")(outputs, targets)
        return torch.stack([self._apply(*client) for client in zip(outputs, targets, strict=True)])

    def _apply(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per sample of one client, `[batch]`."""
        values = self.function(outputs, targets)
        if values.ndim == 1:
            return values
        # torch has no mean of booleans and integers.
        return (values if values.is_floating_point() else values.float()).flatten(1).mean(dim=1)


def check_function(name: str, function: Any, outputs: Tensor, targets: Tensor) -> CustomFunction:
    """The user's `function` for all clients, after a trial on one client's `outputs: [batch, …]` and `targets: [batch,
    …]`; raise UsageError if it fails. `name`, "loss" or "metric", is what errors call it."""
    given_name = ""
    if name == "metric" and isinstance(function, tuple) and len(function) == 2 and isinstance(function[0], str):
        given_name, function = function
    if not callable(function):
        or_pair = ", or a pair (name, function)" * (name == "metric")
        raise UsageError(f"{name}: got {function!r}, expected a function of outputs and targets{or_pair}")
    inputs = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}, {targets.dtype}"
    is_loss = name == "loss"
    trial = outputs.detach().requires_grad_(is_loss)
    try:
        with torch.enable_grad():
            values = function(trial.clone(), targets)  # a copy, because the function may write into it
    except Exception as error:  # the user's function may raise anything
        raise UsageError(f"{name}: fails on {inputs} ({reason(error)})") from error
    if not isinstance(values, Tensor):
        raise UsageError(f"{name}: got {type(values).__name__}, expected a tensor with one number per sample")
    allowed = ((), tuple(outputs.shape[1:]), tuple(targets.shape[1:]))
    if values.shape[:1] != outputs.shape[:1] or tuple(values.shape[1:]) not in allowed:
        raise UsageError(
            f"{name}: got shape {tuple(values.shape)} for {inputs}, expected one number per sample, ({len(outputs)},); "
            "leave the mean over samples out (reduction='none'), or give outputs the targets' shape"
        )
    if is_loss and not values.requires_grad:
        raise UsageError(
            "loss: got numbers without a gradient; leave detach(), item(), NumPy, argmax and the like out of it"
        )
    if is_loss and _has_other_leaves(values, trial):
        warnings.warn(
            "loss: depends on parameters besides the outputs, its own or those of the module that was given, which "
            "stay as they are, because each client trains a copy of the model alone; put what is to be trained into "
            "the model and its outputs, or detach() it",
            stacklevel=2,
        )
    named = function.func if isinstance(function, partial) else function
    own_name = getattr(named, "__name__", type(named).__name__)
    stacked = CustomFunction(function, True, given_name or (own_name if own_name.isidentifier() else "metric"))
    try:
        with rng.forked_generators(outputs.device):
            stacked(torch.stack([outputs, outputs]), torch.stack([targets, targets]))
    except Exception:  # vmap refuses branches on values, operations without a rule, and more
        return replace(stacked, uses_vmap=False)
    return stacked


def _has_other_leaves(values: Tensor, trial: Tensor) -> bool:
    """Whether autograd would find gradients of other tensors than `trial` in `values`."""
    nodes, seen = [values.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", trial) is not trial:  # the node of a leaf has it
            return True
        nodes += [before for before, _ in node.next_functions]
    return False
