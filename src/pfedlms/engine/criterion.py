"""What local steps minimise and what is measured.

A `Criterion` is the task's: cross-entropy and accuracy (of text, of the next token at every position of a window), or a
custom loss and metric. A method adds its `Objective`, whose tensors are found here, checked, and split together with
the clients of a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from pfedlms.cohort import Cohort
from pfedlms.errors import MethodError
from pfedlms.methods.contract import Objective, PerClient
from pfedlms.step import cross_entropy, sample_losses
from pfedlms.step.own import OverClients

Leaf = Tensor | PerClient


@dataclass(frozen=True)
class Criterion:
    """The default is cross-entropy and accuracy. Scores are better the higher they are."""

    loss: OverClients | None = None
    metric: OverClients | None = None
    classifies: bool = True
    """Whether outputs are one number per class, so that accuracy can be measured; minus the loss if not."""
    positions: int = 1
    """Predictions for one sample: of windows of tokens, their length."""

    @property
    def score(self) -> str | None:
        """What is measured in place of accuracy."""
        if self.metric is not None:
            return self.metric.name
        return None if self.classifies else "-loss"

    @property
    def stacks(self) -> bool:
        """Whether the loss is computed for all clients at once, without looking at values."""
        return self.loss is None or self.loss.stacks

    def training_losses(
        self, objective_of: Callable[[slice], Objective], outputs: Tensor, features: Tensor | None, targets: Tensor,
        rows: slice,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
        """The task's loss of every client, and what the objective adds from features; see `models.forward.Loss`."""
        if self.loss is None:
            losses, slope = cross_entropy(*_in_a_row(outputs, targets))
            root, slope = outputs, slope.view_as(outputs)
        else:
            root = self.loss(outputs, targets).mean(dim=1)
            losses, slope = root.detach(), torch.ones_like(root)
        extra = None if features is None else checked_loss(objective_of(rows), *_in_a_row(features, targets))
        if extra is None or not extra.requires_grad:  # features that no parameter has a part in
            return losses, [root], [slope]
        return losses, [root, extra], [slope, torch.ones_like(extra)]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of every sample, `[clients, batch]`; summed over its tokens where it is a window of them."""
        if self.loss is None:
            return _sum(sample_losses(*_in_a_row(outputs, targets)).view_as(targets))
        return self._over_tokens(self.loss(outputs, targets))

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Score and loss of every sample, likewise."""
        losses = self.losses(outputs, targets)
        if self.metric is not None:
            return self._over_tokens(self.metric(outputs, targets)), losses
        return _sum(outputs.argmax(dim=-1) == targets) if self.classifies else -losses, losses

    def _over_tokens(self, values: Tensor) -> Tensor:
        """A custom loss or metric is a mean over tokens."""
        return values * self.positions if self.positions > 1 else values


def _in_a_row(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`[clients, batch, length, …]` and `[clients, batch, length]` with all tokens of a batch in one axis; of targets
    `[clients, batch]` as they are."""
    return values.flatten(1, targets.ndim - 1), targets.flatten(1)


def _sum(values: Tensor) -> Tensor:
    """Over the tokens of each sample."""
    return values if values.ndim == 2 else values.flatten(2).sum(dim=2)


# --- the tensors inside an objective ----------------------------------------------------------------------------------


def attributes(value: Any) -> dict[str, Any] | None:
    """What is set on an object, without what it has computed from that and keeps (`cached_property`); None for what
    cannot be looked into."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    kind: Any = type(value)
    kept = _kept(kind)
    return {name: entry for name, entry in vars(value).items() if name not in kept}


@lru_cache(maxsize=256)
def _kept(kind: Any) -> frozenset[str]:
    """The names under which objects of a class keep what they have computed."""
    names = (name for each in kind.__mro__ for name, own in vars(each).items() if isinstance(own, cached_property))
    return frozenset(names)


def changed(value: Any, change: Callable[[Leaf, str], Leaf], fresh: bool = False, path: str = "") -> Any:
    """`value` with `change` applied to every tensor inside, given with its path. Objects in which nothing changes stay
    themselves; with `fresh` all are copied, without what they have computed and keep."""
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
    if (own := attributes(value)) is None:
        return value
    values = {name: changed(entry, change, fresh, f"{path}.{name}" if path else name) for name, entry in own.items()}
    if not fresh and all(values[name] is own[name] for name in own):
        return value
    copy = object.__new__(type(value))
    for name, entry in values.items():
        object.__setattr__(copy, name, entry)
    return copy


def leaves(value: Any) -> dict[str, Leaf]:
    """Every tensor inside `value` by its path, in the order of `changed`."""
    found: dict[str, Leaf] = {}

    def note(leaf: Leaf, path: str) -> Leaf:
        found[path] = leaf
        return leaf

    changed(value, note)
    return found


def splitter(objective: Objective) -> Callable[[slice], Objective]:
    """The objective of some rows of the cohort it was made for."""
    if not any(isinstance(leaf, PerClient) for leaf in leaves(objective).values()):
        return lambda rows: objective
    return lambda rows: _with_rows(objective, lambda value: value[rows])


def filled_up(objective: Objective, clients: int) -> Objective:
    """The objective of a cohort that is filled up to `clients` with copies of its last client."""
    return _with_rows(
        objective, lambda own: torch.cat([own, own[-1:].expand(clients - len(own), *own.shape[1:])])
    )  # fmt: skip


def _with_rows(objective: Objective, change: Callable[[Tensor], Tensor]) -> Objective:
    made: Objective = changed(
        objective, lambda leaf, path: PerClient(change(leaf.value)) if isinstance(leaf, PerClient) else leaf
    )
    return made


# --- checks of an objective -------------------------------------------------------------------------------------------


def check_objective(objective: Objective, cohort: Cohort, remade: Callable[[Cohort], Objective] | None = None) -> None:
    """Tensors with one row for each client must be marked. A tensor may have as many rows by accident (ten classes, ten
    clients); then it is in `cohort.heard`, or it has the same shape in the objective that is `remade` for one client
    alone. With a single client there is nothing that a mark would change."""
    if not isinstance(objective, Objective):
        raise MethodError(f"got {described(objective)}, expected an Objective")
    clients, shared, name = len(cohort.ids), {id(value) for value in cohort.heard.values()}, type(objective).__name__
    alone: dict[str, Leaf] | None = None
    for path, leaf in leaves(objective).items():
        if isinstance(leaf, PerClient):
            expect_rows(f"{name}.{path}", leaf.value, clients, cohort.params.device)
        elif leaf.shape[:1] == (clients,) and clients > 1 and id(leaf) not in shared:
            if remade is not None:
                alone = leaves(remade(cohort.rows(slice(0, 1)))) if alone is None else alone
                if not isinstance(own := alone.get(path), Tensor) or own.shape == leaf.shape:
                    continue
            raise MethodError(
                f"{name}.{path}: got {described(leaf)} with one row for each client, but not marked as such; pass "
                f"PerClient(tensor) and read self.{path}.value in the objective, so that it is split together with the "
                "clients (a tensor that all clients share belongs in cohort.with_heard)"
            )


def checked_gradient(objective: Objective, params: Tensor) -> Tensor | None:
    """`objective.gradient(params)`, contiguous, as kernels read it."""
    found = objective.gradient(params)
    if found is None:
        return None
    _expect_like(f"{type(objective).__name__}.gradient", found, params)
    return found.contiguous()


def checked_step(objective: Objective, params: Tensor, step: int) -> Tensor:
    """`objective.after_step(params, step)`: memory that the next step may write into."""
    found = objective.after_step(params, step)
    if found is params:
        return params
    _expect_like(f"{type(objective).__name__}.after_step", found, params)
    held = (leaf.value if isinstance(leaf, PerClient) else leaf for leaf in leaves(objective).values())
    place = found.untyped_storage().data_ptr()
    return found.clone() if any(own.untyped_storage().data_ptr() == place for own in held) else found.contiguous()


def checked_loss(objective: Objective, features: Tensor, labels: Tensor) -> Tensor:
    """`objective.loss(features, labels)`."""
    found = objective.loss(features, labels)
    if not is_like(found, features.shape[:1], features.dtype, {features.device}):
        raise MethodError(
            f"{type(objective).__name__}.loss: got {described(found)}, expected {features.dtype} of shape "
            f"{list(features.shape[:1])} on {features.device}, one number for each client; take the mean over all "
            "other axes"
        )
    return found


def _expect_like(where: str, value: Any, params: Tensor) -> None:
    if not is_like(value, params.shape, params.dtype, {params.device}):
        raise MethodError(
            f"{where}: got {described(value)}, expected {params.dtype} of shape {list(params.shape)} on "
            f"{params.device}, [clients, dim] like `params`; use expand_as(params), .to(params.dtype) or PerClient"
        )


def expect_rows(what: str, value: Any, clients: int, device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.shape[:1] != (clients,) or value.device != device:
        raise MethodError(
            f"{what}: got {described(value)}, expected a tensor of shape [{clients}, …] on {device}, one row for "
            "each client of the cohort; make it with torch.zeros_like(cohort.params) or value.expand(clients, …)"
        )


def is_like(value: Any, shape: Collection[int], dtype: torch.dtype, devices: Collection[torch.device]) -> bool:
    return (
        isinstance(value, Tensor)
        and tuple(value.shape) == tuple(shape)
        and value.dtype == dtype
        and value.device in devices
    )


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device}"
    return f"a {type(value).__name__}"
