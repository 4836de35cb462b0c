"""Who takes part in a phase, and the state of the clients of a simulation that do not.

Phase 0 is the start (E steps from w⁰), phase r + 1 the local steps of round r.

Every absent client has a row, in memory or in a file. Only rows that were written take memory or disk. If the rows of
all clients exceed `MAX_MEMORY_BYTES`, they are in one file, which the operating system caches as far as there is room.
In a run's folder this file, `clients.bin`, belongs to the checkpoint. Every row has three places in it, and a place
that one of the last two checkpoints refers to is not overwritten. So a checkpoint costs what was written since the one
before, and a process may end at any time.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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

PERSISTENT_FIELDS = ("params", "momentum", "buffers", "state")
"""Fields of a cohort that a checkpoint has."""
MAX_MEMORY_BYTES = 1 << 30  # of rows in memory: every checkpoint contains all of them
_PLACES, _NO_PLACE = 3, 255
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Participation:
    """Draws the participants of every phase: a share of the clients."""

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
        return _draw_participants(rng.stream(self.seed, "participants", phase), self.clients, self.count)


@lru_cache(maxsize=4)  # a phase is asked for several times
def _draw_participants(key: int, clients: int, count: int) -> tuple[int, ...]:
    return tuple(rng.first_of_permutation(key, clients, count).tolist())


class AbsentClients:
    """The state of clients that have trained before and take no part now.

    Args:
        clients: how many clients the run has.
        device: the device of rows in memory.
        example: makes one client as `Method.client_rest` returns it; all rows have its shapes.
    """

    def __init__(self, clients: int, device: torch.device, example: Callable[[], Cohort]) -> None:
        self.clients, self._device, self._make_example = clients, device, example
        self.folder: Path | None = None
        """The run's folder, if it has one: the file is made there."""
        self._place: NDArray[np.uint8] = np.full(clients, _NO_PLACE, dtype=np.uint8)
        """Which of its places in the file a client's row is in."""
        self._places_saved: list[NDArray[np.uint8]] = []
        """The same as the last two checkpoints have it."""

    @cached_property
    def _example(self) -> Cohort:
        return self._make_example().to(_HOST)

    @property
    def in_file(self) -> bool:
        """Whether the rows of all clients would be too large for memory."""
        return self._device.type == "cpu" and self.clients * self._example.nbytes > MAX_MEMORY_BYTES

    @cached_property
    def _rows(self) -> _InMemory | _InFile:
        if self.in_file:
            return _InFile(self._example, self.folder)
        return _InMemory(self._example, self.clients, self._device)

    def has(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """For each of these clients, whether it has a row here."""
        return np.not_equal(self._place[np.asarray(ids, dtype=np.int64)], _NO_PLACE)

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._place != _NO_PLACE)

    def put(self, cohort: Cohort) -> None:
        """Store clients that become absent."""
        ids = np.array(cohort.ids)
        pinned = [saved[ids] for saved in self._places_saved]
        free = [np.all([taken != place for taken in pinned], axis=0) for place in range(_PLACES)]
        place = np.select(free, range(_PLACES)) if pinned else np.zeros(len(ids), dtype=np.int64)
        self._rows.write(place * self.clients + ids, cohort)
        self._place[ids] = place

    def drop(self, ids: Sequence[int]) -> None:
        """Forget clients that are not absent any more."""
        self._place[np.asarray(ids, dtype=np.int64)] = _NO_PLACE

    def take(self, ids: Sequence[int]) -> Cohort:
        """The stored state of these clients; without N_k, which is not stored."""
        index = np.asarray(ids, dtype=np.int64)
        cohort = self._rows.read(self._place[index].astype(np.int64) * self.clients + index)
        return replace(cohort, ids=tuple(ids), samples=(0,) * len(ids))

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint has: the rows of all absent clients, or their places in the run's file."""
        if not len(self.ids):
            return {}
        if isinstance(self._rows, _InFile) and self.folder is not None:
            self._rows.flush()
            self._places_saved = [*self._places_saved[-1:], self._place.copy()]
            return {"places": torch.from_numpy(self._place.copy())}
        return _rows_to_dict(self.take(self.ids.tolist()).to(_HOST))

    def load(self, state: dict[str, Any], own: range | None = None) -> None:
        """Resume from `state()`, with all clients or with those in the range `own`."""
        self._place[:] = _NO_PLACE
        own = range(self.clients) if own is None else own
        if "places" in state:
            self._place[own.start : own.stop] = state["places"].numpy()[own.start : own.stop]
            self._places_saved = [self._place.copy()]
        elif state:
            cohort = _dict_to_rows(state)
            if ids := [client for client in cohort.ids if client in own]:
                self.put(cohort.take(ids))


class _InMemory:
    """One table for each tensor of a client. Every row has one place, because checkpoints contain copies."""

    def __init__(self, example: Cohort, clients: int, device: torch.device) -> None:
        self._device = device
        self._tables = example.each(
            lambda value: torch.empty(clients, *value.shape[1:], dtype=value.dtype, device=device)
        )  # fmt: skip

    def write(self, rows: NDArray[np.int64], cohort: Cohort) -> None:
        index = to_device(torch.from_numpy(rows), self._device)
        self._tables.each(lambda table, new: table.index_copy_(0, index, new.to(self._device)), cohort)

    def read(self, rows: NDArray[np.int64]) -> Cohort:
        index = to_device(torch.from_numpy(rows), self._device)
        return self._tables.each(lambda table: table.index_select(0, index))


class _InFile:
    """Rows as records of bytes, one after another. Records that were never written take no room on the disk."""

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

    def write(self, rows: NDArray[np.int64], cohort: Cohort) -> None:
        in_order = self._example.each(lambda _, value: value, cohort)  # a method may return its state in another order
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
        ends = np.cumsum([value.nbytes for value in self._example.persistent_tensors])[:-1].tolist()
        parts = iter(np.split(records, ends, axis=1))

        def next_part(example: Tensor) -> Tensor:
            values = np.ascontiguousarray(next(parts)).view(example.numpy().dtype)
            return torch.from_numpy(values).reshape(len(rows), *example.shape[1:])

        return self._example.each(next_part)

    def flush(self) -> None:
        os.fsync(self._file)


def _rows_to_dict(cohort: Cohort) -> dict[str, Any]:
    fields = {name: getattr(cohort, name) for name in PERSISTENT_FIELDS}
    return {"ids": torch.tensor(cohort.ids, dtype=torch.int64), **fields}


def _dict_to_rows(state: dict[str, Any]) -> Cohort:
    ids = tuple(state["ids"].tolist())
    return Cohort(ids, (0,) * len(ids), **{name: state[name] for name in PERSISTENT_FIELDS})


def merge_absent_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of several `AbsentClients`, each with its own range of clients, as one, in the order of ids."""
    parts = [state for state in states if state]
    if not parts:
        return {}
    if "places" in parts[0]:
        return {"places": torch.stack([part["places"] for part in parts]).amin(dim=0)}
    return _rows_to_dict(joined([_dict_to_rows(part) for part in parts]))
