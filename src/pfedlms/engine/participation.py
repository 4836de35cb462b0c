"""The participants of a phase, and the state of all clients of a simulation.

Phase 0 is the start (E steps from w⁰), phase r + 1 the local steps of round r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any

import torch

from pfedlms import rng
from pfedlms.cohort import Cohort, joined
from pfedlms.engine.absent import KEPT, Absent
from pfedlms.methods.contract import Method


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
        return _drawn(rng.stream(self.seed, "participants", phase), self.clients, self.count)


@lru_cache(maxsize=4)  # a phase is asked for several times
def _drawn(key: int, clients: int, count: int) -> tuple[int, ...]:
    return tuple(rng.smallest(key, clients, count).tolist())


class Clients:
    """The state of all clients.

    The participants of the last phase are `present`, stacked on the device in cohorts of up to `group`. Clients that
    trained earlier are `absent`: kept as `Method.client_rest` returns them, on `home`, which is the device if there is
    room for all, else the host or a file. Clients that have never taken part have no state.
    """

    def __init__(
        self,
        method: Method,
        fresh: Callable[[tuple[int, ...]], Cohort],
        clients: int,
        device: torch.device,
        home: torch.device,
        group: int,
    ) -> None:
        self._method, self._fresh = method, fresh
        self._device, self._group = device, group
        self.present: list[Cohort] = []
        self.absent = Absent(clients, home, lambda: method.client_rest(method.client_start(fresh((0,)))))

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
                self.absent.put(self._method.client_rest(part))
        self.present = [cohort.at_rest() for cohort in cohorts]
        self.absent.drop(self.present_ids)

    def _gathered(self, ids: tuple[int, ...], present: Sequence[Cohort]) -> Cohort:
        wanted, parts = set(ids), []
        for cohort in present:
            staying = [client for client in cohort.ids if client in wanted]
            if staying:
                parts.append(cohort.at_rest().take(staying))
                wanted.difference_update(staying)
        others = [client for client in ids if client in wanted]
        known = self.absent.has(others)
        back, new = tuple(compress(others, known)), tuple(compress(others, ~known))
        if back:
            parts.append(self._restored(back))
        if new:
            parts.append(self._method.client_start(self._fresh(new)))
        return joined(parts).take(ids)

    def _restored(self, ids: tuple[int, ...]) -> Cohort:
        """Absent clients: what they kept, with w⁰ for everything else, which is replaced before it is used."""
        fresh, kept = self._method.client_start(self._fresh(ids)), self.absent.take(ids, self._device)
        if kept["params"].shape[1]:
            fresh = replace(fresh, params=kept["params"], momentum=kept["momentum"])
        return replace(fresh, buffers=kept["buffers"], state={**fresh.state, **kept["state"]})

    def state(self) -> dict[str, Any]:
        """All clients, on the host: those present in one stack, however they are grouped, and those absent."""
        return state_of(self.present, self.absent.state())

    def load(self, state: dict[str, Any], samples: Sequence[int]) -> None:
        """Resume from `state()`."""
        ids = tuple(state["trained"])
        together = Cohort(ids, tuple(samples[k] for k in ids), **{name: state[name] for name in KEPT})
        self.present = [together.take(group).to(self._device) for group in self.groups(ids)]
        self.absent.load(state["away"])


def state_of(present: Sequence[Cohort], away: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint has clients."""
    together = joined(present).to(torch.device("cpu"))
    return {**{name: getattr(together, name) for name in KEPT}, "trained": list(together.ids), "away": away}
