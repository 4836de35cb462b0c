"""The participants of a phase, and the state of all clients of a simulation.

Phase 0 is the start (E steps from w⁰), phase r + 1 the local steps of round r.

Clients that take no part have a row each, in memory or in a file. Memory and disk are taken only by rows that are
written. Rows of more than `LARGEST` bytes altogether are in one file, which the system keeps in memory as far as there
is room. In a run's folder this file, `clients.bin`, belongs to the checkpoint: every row has three places, and a place
that one of the last two checkpoints refers to is not written. So a checkpoint costs what was written since the one
before, and a process may end at any time.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, joined
from pfedlms.errors import RunError, StorageError
from pfedlms.methods.contract import Method

KEPT = ("params", "momentum", "buffers", "state")
LARGEST = 1 << 30  # bytes of rows in memory; all of them are written in every checkpoint
_PLACES, _NONE = 3, 255
_HOST = torch.device("cpu")


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
    return tuple(rng.first_of_permutation(key, clients, count).tolist())


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
        self.present = [cohort.without_round_values() for cohort in cohorts]
        self.absent.drop(self.present_ids)

    def _gathered(self, ids: tuple[int, ...], present: Sequence[Cohort]) -> Cohort:
        wanted, parts = set(ids), []
        for cohort in present:
            staying = [client for client in cohort.ids if client in wanted]
            if staying:
                parts.append(cohort.without_round_values().take(staying))
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
        fresh, kept = self._method.client_start(self._fresh(ids)), self.absent.take(ids).to(self._device)
        if kept.params.shape[1]:
            fresh = replace(fresh, params=kept.params, momentum=kept.momentum)
        return replace(fresh, buffers=kept.buffers, state={**fresh.state, **kept.state})

    def state(self) -> dict[str, Any]:
        """All clients, on the host: those present in one stack, however they are grouped, and those absent."""
        return state_of(self.present, self.absent.state())

    def load(self, state: dict[str, Any], samples: Sequence[int], own: range | None = None) -> None:
        """Resume from `state()`, or with those of its clients that are in `own`."""
        ids = tuple(state["trained"])
        together = Cohort(ids, tuple(samples[k] for k in ids), **{name: state[name] for name in KEPT})
        here = [client for client in ids if own is None or client in own]
        self.present = [together.take(group).to(self._device) for group in self.groups(here)]
        self.absent.load(state["away"], own)


def state_of(present: Sequence[Cohort], away: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint has clients."""
    together = joined(present).to(_HOST)
    return {**{name: getattr(together, name) for name in KEPT}, "trained": list(together.ids), "away": away}


class Absent:
    """The state of clients that take no part.

    Args:
        clients: how many there are.
        device: where rows are that are not in a file.
        example: makes one client as it is kept, which has the shapes of all.
    """

    def __init__(self, clients: int, device: torch.device, example: Callable[[], Cohort]) -> None:
        self.clients, self._device, self._make_example = clients, device, example
        self.folder: Path | None = None
        """Of the run, if it has one: where the file is made."""
        self._place: NDArray[np.uint8] = np.full(clients, _NONE, dtype=np.uint8)
        self._saved: list[NDArray[np.uint8]] = []

    @cached_property
    def _example(self) -> Cohort:
        return self._make_example().to(_HOST)

    @property
    def in_file(self) -> bool:
        """Whether the rows of all clients are too large for memory."""
        return self._device.type == "cpu" and self.clients * self._example.nbytes > LARGEST

    @cached_property
    def _rows(self) -> _InMemory | _InFile:
        if self.in_file:
            return _InFile(self._example, self.folder)
        return _InMemory(self._example, self.clients, self._device)

    def has(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which of these clients are absent, of those that have taken part."""
        return np.not_equal(self._place[np.asarray(ids, dtype=np.int64)], _NONE)

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._place != _NONE)

    def put(self, kept: Cohort) -> None:
        """These clients are absent now."""
        ids = np.array(kept.ids)
        pinned = [saved[ids] for saved in self._saved]
        free = [np.all([own != place for own in pinned], axis=0) for place in range(_PLACES)]
        place = np.select(free, range(_PLACES)) if pinned else np.zeros(len(ids), dtype=np.int64)
        self._rows.write(place * self.clients + ids, kept)
        self._place[ids] = place

    def drop(self, ids: Sequence[int]) -> None:
        """These clients are not absent any more."""
        self._place[np.asarray(ids, dtype=np.int64)] = _NONE

    def take(self, ids: Sequence[int]) -> Cohort:
        """What these clients keep; N_k is not part of it."""
        chosen = np.asarray(ids, dtype=np.int64)
        found = self._rows.read(self._place[chosen].astype(np.int64) * self.clients + chosen)
        return replace(found, ids=tuple(ids), samples=(0,) * len(ids))

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it: the rows of all absent clients, or where they are in the run's file."""
        if not len(self.ids):
            return {}
        if self.in_file and self.folder is not None:
            self._rows.flush()
            self._saved = [*self._saved[-1:], self._place.copy()]
            return {"places": torch.from_numpy(self._place.copy())}
        return _rows_of(self.take(self.ids.tolist()).to(_HOST))

    def load(self, state: dict[Any, Any], own: range | None = None) -> None:
        """Resume from `state()`, or with those of its clients that are in `own`."""
        self._place[:] = _NONE
        own = range(self.clients) if own is None else own
        if "places" in state:
            self._place[own.start : own.stop] = state["places"].numpy()[own.start : own.stop]
            self._saved = [self._place.copy()]
            return
        # Earlier versions kept each client separately.
        kept = [_kept_in(state)] if "ids" in state else [_kept_in({"ids": [k], **one}) for k, one in state.items()]
        for cohort in kept:
            if here := [client for client in cohort.ids if client in own]:
                self.put(cohort.take(here))


class _InMemory:
    """A table for each thing that is kept; every row has one place, because checkpoints have copies."""

    def __init__(self, example: Cohort, clients: int, device: torch.device) -> None:
        self._device = device
        self._tables = example.each(
            lambda one: torch.empty(clients, *one.shape[1:], dtype=one.dtype, device=device)
        )  # fmt: skip

    def write(self, rows: NDArray[np.int64], kept: Cohort) -> None:
        index = to_device(torch.from_numpy(rows), self._device)
        self._tables.each(lambda table, new: table.index_copy_(0, index, new.to(self._device)), kept)

    def read(self, rows: NDArray[np.int64]) -> Cohort:
        index = to_device(torch.from_numpy(rows), self._device)
        return self._tables.each(lambda table: table.index_select(0, index))

    def flush(self) -> None:
        """Nothing is on its way to a disk."""


class _InFile:
    """Rows as records of bytes, one after another; records that are never written take no room on the disk."""

    def __init__(self, example: Cohort, folder: Path | None) -> None:
        self._example, self._size = example, example.nbytes
        self._path = (folder or Path(tempfile.gettempdir())) / "clients.bin"
        if folder is None:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        else:
            writes = os.access(self._path if self._path.exists() else folder, os.W_OK)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY, 0o666)
        weakref.finalize(self, os.close, self._file)

    def write(self, rows: NDArray[np.int64], kept: Cohort) -> None:
        in_order = self._example.each(lambda one, own: own, kept)  # a method may return its state in another order
        tensors = (value.cpu().contiguous().numpy() for value in in_order.persistent_tensors)
        records = np.concatenate([value.reshape(len(rows), -1).view(np.uint8) for value in tensors], axis=1)
        try:
            for row, record in zip(rows.tolist(), records, strict=True):
                data, place = record.data, row * self._size
                while len(data):  # a full disk takes a part first
                    written = os.pwrite(self._file, data, place)
                    data, place = data[written:], place + written
        except OSError as error:
            raise StorageError(self._path, error.strerror or str(error), resume=self._path.parent) from error

    def read(self, rows: NDArray[np.int64]) -> Cohort:
        records = np.empty((len(rows), self._size), dtype=np.uint8)
        for row, record in zip(rows.tolist(), records, strict=True):
            if os.preadv(self._file, [record.data], row * self._size) != self._size:
                raise RunError(f"{self._path}: is shorter than its checkpoint says; restore it from a complete copy")
        ends = np.cumsum([one.nbytes for one in self._example.persistent_tensors])[:-1].tolist()
        parts = iter(np.split(records, ends, axis=1))

        def next_part(one: Tensor) -> Tensor:
            own = np.ascontiguousarray(next(parts)).view(one.numpy().dtype)
            return torch.from_numpy(own).reshape(len(rows), *one.shape[1:])

        return self._example.each(next_part)

    def flush(self) -> None:
        os.fsync(self._file)


def _rows_of(kept: Cohort) -> dict[str, Any]:
    return {"ids": torch.tensor(kept.ids, dtype=torch.int64), **{name: getattr(kept, name) for name in KEPT}}


def _kept_in(state: dict[str, Any]) -> Cohort:
    ids = tuple(state["ids"].tolist() if isinstance(state["ids"], Tensor) else state["ids"])
    return Cohort(ids, (0,) * len(ids), **{name: state[name] for name in KEPT})


def merged_rows(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of several `Absent`, each with clients of its own, as one; in the order of ids."""
    found = [each for each in parts if each]
    if not found:
        return {}
    if "places" in found[0]:
        return {"places": torch.stack([each["places"] for each in found]).amin(dim=0)}
    return _rows_of(joined([_kept_in(each) for each in found]))
