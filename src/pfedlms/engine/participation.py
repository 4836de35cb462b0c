"""The participants of a phase, and the state of all clients of a simulation.

Phase 0 is the start (E steps from w⁰), phase r + 1 the local steps of round r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pfedlms import rng
from pfedlms.cohort import Cohort, joined
from pfedlms.engine.borders import check_kept
from pfedlms.methods.contract import Method

_KEPT = ("params", "momentum", "buffers", "state")


@dataclass(frozen=True)
class Participation:
    """A share of the clients, drawn anew for every phase."""

    clients: int
    share: float
    seed: int

    @property
    def count(self) -> int:
        """How many take part: max(1, round(share · K))."""
        return max(1, round(self.share * self.clients))

    def of(self, phase: int) -> tuple[int, ...]:
        """Ids of the phase's participants, ascending."""
        if self.count == self.clients:
            return tuple(range(self.clients))
        return tuple(rng.smallest(rng.stream(self.seed, "participants", phase), self.clients, self.count).tolist())


class Clients:
    """The state of all clients.

    The participants of the last phase are `present`, stacked on the device in cohorts of up to `group`. Clients that
    trained earlier are absent: each is kept separately, as `Method.client_rest` returns it, on `home`, which is the
    device if there is room for all, else the host. Clients that have never taken part have no state.
    """

    def __init__(
        self,
        method: Method,
        fresh: Callable[[tuple[int, ...]], Cohort],
        device: torch.device,
        home: torch.device,
        group: int,
    ) -> None:
        self._method, self._fresh = method, fresh
        self._device, self._home, self._group = device, home, group
        self.present: list[Cohort] = []
        self._absent: dict[int, Cohort] = {}

    @property
    def present_ids(self) -> tuple[int, ...]:
        return tuple(client for cohort in self.present for client in cohort.ids)

    def groups(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """The ids of each cohort."""
        return [tuple(ids[start : start + self._group]) for start in range(0, len(ids), self._group)]

    def take(self, ids: tuple[int, ...], present: Sequence[Cohort]) -> list[Cohort]:
        """The current state of these clients, on the device; those in `present` have the state they have there. Nothing
        changes until they are `put`."""
        groups = self.groups(ids)
        if groups == [cohort.ids for cohort in present]:
            return list(present)
        return [self._gathered(group, present) for group in groups]

    def put(self, cohorts: Sequence[Cohort]) -> None:
        """These clients are present now; the others become absent."""
        staying = {client for cohort in cohorts for client in cohort.ids}
        for cohort in self.present:
            leaving = [client for client in cohort.ids if client not in staying]
            if leaving:
                part = cohort.take(leaving)
                kept = check_kept(self._method, part, self._method.client_rest(part)).to(self._home)
                for row, client in enumerate(leaving):
                    # Cloned, because a view would keep all of them in memory.
                    self._absent[client] = kept.rows(slice(row, row + 1)).each(torch.clone)
        self.present = [cohort.at_rest() for cohort in cohorts]
        for client in staying:
            self._absent.pop(client, None)

    def _gathered(self, ids: tuple[int, ...], present: Sequence[Cohort]) -> Cohort:
        wanted, parts = set(ids), []
        for cohort in present:
            staying = [client for client in cohort.ids if client in wanted]
            if staying:
                parts.append(cohort.at_rest().take(staying))
                wanted.difference_update(staying)
        back = [client for client in ids if client in wanted and client in self._absent]
        if back:
            parts.append(self._restored(joined([self._absent[client] for client in back]).to(self._device)))
        new = tuple(client for client in ids if client in wanted and client not in self._absent)
        if new:
            parts.append(self._method.client_start(self._fresh(new)))
        return joined(parts).take(ids)

    def _restored(self, kept: Cohort) -> Cohort:
        """The kept state, with w⁰ for everything else, which is replaced before it is used."""
        fresh = self._method.client_start(self._fresh(kept.ids))
        if kept.params.shape[1]:
            fresh = replace(fresh, params=kept.params, momentum=kept.momentum)
        return replace(fresh, buffers=kept.buffers, state={**fresh.state, **kept.state})

    def state(self) -> dict[str, Any]:
        """All clients, on the host: those present in one stack, however they are grouped, and each absent one."""
        together = joined(self.present).to(torch.device("cpu"))
        away = {
            client: {name: getattr(cohort.to(torch.device("cpu")), name) for name in _KEPT}
            for client, cohort in sorted(self._absent.items())
        }
        return {**{name: getattr(together, name) for name in _KEPT}, "trained": list(together.ids), "away": away}

    def load(self, state: dict[str, Any], samples: Sequence[int]) -> None:
        """Resume from `state()`."""

        def cohort(ids: tuple[int, ...], values: dict[str, Any], device: torch.device) -> Cohort:
            return Cohort(ids, tuple(samples[k] for k in ids), **{name: values[name] for name in _KEPT}).to(device)

        together = cohort(tuple(state["trained"]), state, torch.device("cpu"))
        self.present = [together.take(group).to(self._device) for group in self.groups(together.ids)]
        self._absent = {client: cohort((client,), values, self._home) for client, values in state["away"].items()}
