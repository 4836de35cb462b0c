"""What local steps minimise and what is measured: cross-entropy and accuracy (of text, of the next token at every
position of a window), or a custom loss and metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.engine.borders import checked_loss
from pfedlms.methods.contract import Objective
from pfedlms.step import cross_entropy, sample_losses
from pfedlms.step.own import OverClients


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

    def minimised(
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

    def measured(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Score and loss of every sample, `[clients, batch]`; summed over its tokens where it is a window of them."""
        if self.loss is None:
            losses = _sum(sample_losses(*_in_a_row(outputs, targets)).view_as(targets))
        else:
            losses = self._over_tokens(self.loss(outputs, targets))
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
