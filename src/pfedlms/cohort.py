"""The state that clients carry from round to round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pfedlms.backend import to_device

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Cohort:
    """The state of some clients, stacked; a simulation has all of them in one cohort, a real device is a cohort of one.

    Every tensor but those of `heard` has a leading `clients` axis in the order of `ids` (ascending). Functions take a
    cohort and return a new one.
    """

    ids: tuple[int, ...]
    samples: tuple[int, ...]
    """N_k, the weight of each client."""
    params: Tensor
    """θ: `[clients, dim]`."""
    momentum: Tensor
    """`[clients, dim]`, or `[clients, 0]` when training without momentum; with AdamW `[clients, 2 dim + 1]`, see
    `step.adamw_step_`."""
    buffers: Tensors
    """Running statistics of batch norm and the like: local, never sent."""
    state: Tensors = field(default_factory=dict)
    """What the method keeps between rounds."""
    scratch: Tensors = field(default_factory=dict)
    """What clients computed in this round only."""
    heard: Tensors = field(default_factory=dict)
    """The server's broadcasts of this round; no clients axis."""

    def each(self, change: Callable[..., Tensor], *others: Cohort) -> Cohort:
        """A cohort with `change` applied to every tensor that has a clients axis, together with those of `others`."""
        cohorts = (self, *others)
        values: dict[str, Any] = {
            name: change(*(getattr(one, name) for one in cohorts)) for name in ("params", "momentum")
        }
        for name in ("buffers", "state", "scratch"):
            keys = getattr(self, name)
            values[name] = {key: change(*(getattr(one, name)[key] for one in cohorts)) for key in keys}
        return replace(self, **values)

    def rows(self, rows: slice) -> Cohort:
        """The clients of neighbouring rows, as views."""
        return replace(self.each(lambda value: value[rows]), ids=self.ids[rows], samples=self.samples[rows])

    def take(self, ids: Sequence[int]) -> Cohort:
        """Some of the clients, in the order of `ids`."""
        if tuple(ids) == self.ids:
            return self
        row_of = {client: row for row, client in enumerate(self.ids)}
        rows = [row_of[client] for client in ids]
        if rows and rows == list(range(rows[0], rows[-1] + 1)):
            return self.rows(slice(rows[0], rows[-1] + 1))
        index = torch.tensor(rows, dtype=torch.int64, device=self.params.device)
        taken = self.each(lambda value: value.index_select(0, index))
        return replace(taken, ids=tuple(ids), samples=tuple(self.samples[row] for row in rows))

    def put(self, other: Cohort) -> Cohort:
        """The same clients, with the state of those in `other` replaced by what they have there."""
        row_of = {client: row for row, client in enumerate(self.ids)}
        rows = torch.tensor([row_of[client] for client in other.ids], dtype=torch.int64, device=self.params.device)
        return self.each(lambda old, new: old.index_copy(0, rows, new), other)

    def to(self, device: torch.device) -> Cohort:
        return self if self.params.device == device else self.each(lambda value: value.to(device))

    def without_model(self) -> Cohort:
        """Without the clients' models and momentum: `[clients, 0]`."""
        return replace(self, params=self.params[:, :0], momentum=self.momentum[:, :0])

    def without_round_values(self) -> Cohort:
        """Without `scratch` and `heard`, the values of the current round."""
        return replace(self, scratch={}, heard={}) if self.scratch or self.heard else self

    def with_state(self, **values: Tensor) -> Cohort:
        return replace(self, state={**self.state, **values})

    def with_scratch(self, **values: Tensor) -> Cohort:
        return replace(self, scratch={**self.scratch, **values})

    def with_heard(self, **values: Tensor) -> Cohort:
        """With these values of a broadcast, copied to the clients' device."""
        on_device = {name: to_device(value, self.params.device) for name, value in values.items()}
        return replace(self, heard={**self.heard, **on_device})

    def with_model(self, params: Tensor) -> Cohort:
        """Replace every client's model by `params` (`[dim]` or `[clients, dim]`) and set the momentum to zero."""
        models = to_device(params, self.params.device).expand_as(self.params).clone()
        return replace(self, params=models, momentum=torch.zeros_like(self.momentum))

    @property
    def persistent_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that clients keep from round to round, in the order of `each`."""
        return (self.params, self.momentum, *self.buffers.values(), *self.state.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that clients keep from round to round."""
        return sum(value.nbytes for value in self.persistent_tensors)


def joined(cohorts: Sequence[Cohort]) -> Cohort:
    """Several cohorts as one, in the order given."""
    first, *others = cohorts
    if not others:
        return first
    stacked = first.each(lambda *values: torch.cat(values), *others)
    ids, samples = (tuple(chain.from_iterable(getattr(one, name) for one in cohorts)) for name in ("ids", "samples"))
    return replace(stacked, ids=ids, samples=samples)
