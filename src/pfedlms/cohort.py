"""The state that clients carry from round to round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cohort:
    """The state of some clients, stacked; a simulation has all of them in one cohort, a real device is a cohort of one.

    Every tensor has a leading `clients` axis in the order of `ids` (ascending). Functions take a cohort and return a
    new one.
    """

    ids: tuple[int, ...]
    samples: tuple[int, ...]
    """N_k, the weight of each client."""
    params: Tensor
    """θ: `[clients, dim]`."""
    momentum: Tensor
    """`[clients, dim]`, or `[clients, 0]` when training without momentum."""
    buffers: dict[str, Tensor]
    """Running statistics of batch norm and the like: local, never sent."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """What the method keeps between rounds."""
    scratch: dict[str, Tensor] = field(default_factory=dict)
    """What was computed or received in this round only (no clients axis for what was broadcast); dropped when the
    round ends."""

    def rows(self, rows: slice) -> Cohort:
        """Some of the clients; without `scratch`."""
        params, momentum = self.params[rows], self.momentum[rows]
        buffers, state = ({n: v[rows] for n, v in values.items()} for values in (self.buffers, self.state))
        return Cohort(self.ids[rows], self.samples[rows], params, momentum, buffers, state)

    def with_state(self, **values: Tensor) -> Cohort:
        return replace(self, state={**self.state, **values})

    def with_scratch(self, **values: Tensor) -> Cohort:
        return replace(self, scratch={**self.scratch, **values})

    def with_model(self, params: Tensor) -> Cohort:
        """Replace every client's model by `params` (`[dim]` or `[clients, dim]`); the momentum of the old one is
        forgotten."""
        return replace(self, params=params.expand_as(self.params).clone(), momentum=torch.zeros_like(self.momentum))
