"""What local steps minimise and what evaluations measure.

The task has a `Criterion`: cross-entropy and accuracy (for text, of the next token at every position of a window), or a
custom loss and metric. A method adds its `Objective`, whose tensors are found here, and split together with the clients
of a cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from pfedlms.methods.contract import Objective, PerClient
from pfedlms.step import cross_entropy, sample_losses
from pfedlms.step.custom import CustomFunction

Leaf = Tensor | PerClient
FeatureLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""What an objective adds to the loss of some clients, `[clients]`, from their features and labels."""


@dataclass(frozen=True)
class Criterion:
    """The task's loss and metric; the default is cross-entropy and accuracy. Higher scores are better."""

    loss: CustomFunction | None = None
    metric: CustomFunction | None = None
    classifies: bool = True
    """Whether outputs are one number per class, so that accuracy can be measured. If not, minus the loss is."""
    positions: int = 1
    """Predictions for one sample: the length of a window of tokens, else 1."""

    @property
    def score(self) -> str | None:
        """The name of what is measured in place of accuracy; None for accuracy."""
        if self.metric is not None:
            return self.metric.name
        return None if self.classifies else "-loss"

    @property
    def stacks(self) -> bool:
        """Whether the loss is computed for all clients at once, without looking at values."""
        return self.loss is None or self.loss.uses_vmap

    def training_losses(
        self, feature_loss: FeatureLoss, outputs: Tensor, features: Tensor | None, targets: Tensor, rows: slice
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The task's loss of every client, and the tensors to differentiate with their gradients, among them what the
        objective adds from features; see `models.forward.Loss`."""
        if self.loss is None:
            root, (losses, slope) = outputs, cross_entropy(outputs, targets)
        else:
            root = self.loss(outputs, targets).mean(dim=1)
            losses, slope = root.detach(), torch.ones_like(root)
        # All tokens of a batch are in one axis of the features.
        flat = targets.flatten(1)
        extra = None if features is None else feature_loss(rows, features.flatten(1, targets.ndim - 1), flat)
        if extra is None or not extra.requires_grad:  # no parameter has a part in the features
            return losses, [root], [slope]
        return losses, [root, extra], [slope, torch.ones_like(extra)]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of every sample, `[clients, batch]`; of a window of tokens, the sum over its tokens."""
        if self.loss is None:
            return _sum_tokens(sample_losses(outputs, targets))
        return self._over_tokens(self.loss(outputs, targets))

    def scores_and_losses(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Score and loss of every sample, `[clients, batch]`; of a window of tokens, sums over its tokens."""
        losses = self.losses(outputs, targets)
        if self.metric is not None:
            return self._over_tokens(self.metric(outputs, targets)), losses
        return _sum_tokens(outputs.argmax(dim=-1) == targets) if self.classifies else -losses, losses

    def _over_tokens(self, values: Tensor) -> Tensor:
        """A custom loss or metric as a sum over tokens: it is computed as a mean over them."""
        return values * self.positions if self.positions > 1 else values


def _sum_tokens(values: Tensor) -> Tensor:
    """Sums over the tokens of each sample."""
    return values if values.ndim == 2 else values.flatten(2).sum(dim=2)


# --- the tensors inside an objective ----------------------------------------------------------------------------------


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, without cached values (`cached_property`); None if it has no readable ones."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    kind: Any = type(value)
    cached = _cached_names(kind)
    return {name: entry for name, entry in vars(value).items() if name not in cached}


@lru_cache(maxsize=256)
def _cached_names(kind: Any) -> frozenset[str]:
    """The names of all cached properties of a class."""
    members = (member for base in kind.__mro__ for member in vars(base).items())
    return frozenset(name for name, value in members if isinstance(value, cached_property))


def changed(value: Any, change: Callable[[Leaf, str], Leaf], fresh: bool = False, path: str = "") -> Any:
    """`value` with `change(tensor, path)` applied to every tensor inside. Objects in which nothing changes are not
    copied. With `fresh` all objects are copied, without their cached values."""
    if isinstance(value, Tensor | PerClient):
        return change(value, path)
    if type(value) in (int, float, bool, str):  # most of what objects hold
        return value
    if isinstance(value, list | tuple):
        entries = [changed(entry, change, fresh, f"{path}[{index}]") for index, entry in enumerate(value)]
        if not fresh and all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, dict):
        values = {key: changed(entry, change, fresh, f"{path}[{key!r}]") for key, entry in value.items()}
        return values if fresh or any(values[key] is not value[key] for key in value) else value
    if (old := attributes(value)) is None:
        return value
    values = {name: changed(entry, change, fresh, f"{path}.{name}" if path else name) for name, entry in old.items()}
    if not fresh and all(values[name] is old[name] for name in old):
        return value
    copy = object.__new__(type(value))
    for name, entry in values.items():
        object.__setattr__(copy, name, entry)
    return copy


def tensors_inside(value: Any) -> dict[str, Leaf]:
    """Every tensor inside `value` by its path, in the order of `changed`."""
    tensors: dict[str, Leaf] = {}

    def collect(leaf: Leaf, path: str) -> Leaf:
        tensors[path] = leaf
        return leaf

    changed(value, collect)
    return tensors


def splitter(objective: Objective) -> Callable[[slice], Objective]:
    """A function that returns the objective for some rows of the cohort it was made for."""
    if not any(isinstance(leaf, PerClient) for leaf in tensors_inside(objective).values()):
        return lambda rows: objective
    return lambda rows: _change_per_client(objective, lambda value: value[rows])


def filled_up(objective: Objective, clients: int) -> Objective:
    """The objective of a cohort that is padded to `clients` with copies of its last client."""
    return _change_per_client(
        objective, lambda rows: torch.cat([rows, rows[-1:].expand(clients - len(rows), *rows.shape[1:])])
    )  # fmt: skip


def _change_per_client(objective: Objective, change: Callable[[Tensor], Tensor]) -> Objective:
    """The objective with `change` applied to all its tensors that are marked PerClient."""
    result: Objective = changed(
        objective, lambda leaf, path: PerClient(change(leaf.value)) if isinstance(leaf, PerClient) else leaf
    )
    return result
