"""What clients keep while they take no part: a row for each client, in memory or in a file.

Memory and disk are taken only by rows that are written. Rows of more than `LARGEST` bytes altogether are in one file,
which the system keeps in memory as far as there is room. In a run's folder this file, `clients.bin`, belongs to the
checkpoint: every row has three places, and a place that one of the last two checkpoints refers to is not written. So a
checkpoint costs what was written since the one before, and a process may end at any time.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import RunError, StorageError

KEPT = ("params", "momentum", "buffers", "state")
LARGEST = 1 << 30  # bytes of rows in memory; all of them are written in every checkpoint
_PLACES, _NONE = 3, 255


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
        return self._make_example().to(torch.device("cpu"))

    @property
    def in_file(self) -> bool:
        """Whether the rows of all clients are too large for memory."""
        return self._device.type == "cpu" and self.clients * self._example.nbytes > LARGEST

    @cached_property
    def _rows(self) -> _InMemory | _InFile:
        example = _columns(self._example)
        return _InFile(example, self.folder) if self.in_file else _InMemory(example, self.clients, self._device)

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
        self._rows.write(place * self.clients + ids, _columns(kept))
        self._place[ids] = place

    def drop(self, ids: Sequence[int]) -> None:
        """These clients are not absent any more."""
        self._place[np.asarray(ids, dtype=np.int64)] = _NONE

    def take(self, ids: Sequence[int], device: torch.device) -> dict[str, Any]:
        """What these clients keep, by the names of `KEPT`."""
        chosen = np.asarray(ids, dtype=np.int64)
        found = self._rows.read(self._place[chosen].astype(np.int64) * self.clients + chosen)
        return _nested({name: value.to(device) for name, value in found.items()})

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it: the rows of all absent clients, or where they are in the run's file."""
        if not len(self.ids):
            return {}
        if self.in_file and self.folder is not None:
            self._rows.flush()
            self._saved = [*self._saved[-1:], self._place.copy()]
            return {"places": torch.from_numpy(self._place.copy())}
        return {"ids": torch.from_numpy(self.ids), **self.take(self.ids.tolist(), torch.device("cpu"))}

    def load(self, state: dict[Any, Any]) -> None:
        """Resume from `state()`."""
        self._place[:] = _NONE
        if "places" in state:
            self._place[:] = state["places"].numpy()
            self._saved = [self._place.copy()]
        elif "ids" in state:
            self._load(state["ids"].tolist(), state)
        else:  # earlier versions kept each client separately
            for client, values in state.items():
                self._load([client], values)

    def _load(self, ids: Sequence[int], values: dict[str, Any]) -> None:
        if ids:
            self.put(Cohort(tuple(ids), (0,) * len(ids), **{name: values[name] for name in KEPT}))


class _InMemory:
    """A table for each thing that is kept; every row has one place, because checkpoints have copies."""

    def __init__(self, example: Tensors, clients: int, device: torch.device) -> None:
        self._device = device
        self._tables = {
            name: torch.empty(clients, *one.shape[1:], dtype=one.dtype, device=device) for name, one in example.items()
        }

    def write(self, rows: NDArray[np.int64], columns: Tensors) -> None:
        index = to_device(torch.from_numpy(rows), self._device)
        for name, value in columns.items():
            self._tables[name].index_copy_(0, index, value.to(self._device))

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        index = to_device(torch.from_numpy(rows), self._device)
        return {name: table.index_select(0, index) for name, table in self._tables.items()}

    def flush(self) -> None:
        """Nothing is on its way to a disk."""


class _InFile:
    """Rows as records of bytes, one after another; records that are never written take no room on the disk."""

    def __init__(self, example: Tensors, folder: Path | None) -> None:
        self._example = example
        self._ends = np.cumsum([one.nbytes for one in example.values()]).tolist()
        self._path = (folder or Path(tempfile.gettempdir())) / "clients.bin"
        if folder is None:
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        else:
            writes = os.access(self._path if self._path.exists() else folder, os.W_OK)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY, 0o666)
        weakref.finalize(self, os.close, self._file)

    def write(self, rows: NDArray[np.int64], columns: Tensors) -> None:
        parts = [value.cpu().contiguous().numpy().reshape(len(rows), -1).view(np.uint8) for value in columns.values()]
        records = np.concatenate(parts, axis=1)
        size = records.shape[1]
        try:
            for row, record in zip(rows.tolist(), records, strict=True):
                data, place = record.data, row * size
                while len(data):  # a full disk takes a part first
                    written = os.pwrite(self._file, data, place)
                    data, place = data[written:], place + written
        except OSError as error:
            raise StorageError(self._path, error.strerror or str(error), resume=self._path.parent) from error

    def read(self, rows: NDArray[np.int64]) -> Tensors:
        size = self._ends[-1]
        records = np.empty((len(rows), size), dtype=np.uint8)
        for row, record in zip(rows.tolist(), records, strict=True):
            if os.preadv(self._file, [record], row * size) != size:
                raise RunError(f"{self._path}: is shorter than its checkpoint says; restore it from a complete copy")
        found = {}
        for (name, one), part in zip(self._example.items(), np.split(records, self._ends[:-1], axis=1), strict=True):
            own = np.ascontiguousarray(part).view(one.numpy().dtype)
            found[name] = torch.from_numpy(own).reshape(len(rows), *one.shape[1:])
        return found

    def flush(self) -> None:
        os.fsync(self._file)


def _columns(cohort: Cohort) -> Tensors:
    """All that is kept of some clients, by name; see `_nested`."""
    return _columns_of({part: getattr(cohort, part) for part in KEPT})


def _columns_of(kept: dict[str, Any]) -> Tensors:
    found: Tensors = {}
    for part in KEPT:
        value = kept[part]
        found |= {f"{part}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {part: value}
    return found


def _nested(columns: Tensors) -> dict[str, Any]:
    nested: dict[str, Any] = {"buffers": {}, "state": {}}
    for name, value in columns.items():
        part, dot, key = name.partition(".")
        if dot:
            nested[part][key] = value
        else:
            nested[part] = value
    return nested


def merged_rows(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of several `Absent`, each with clients of its own, as one; in the order of ids."""
    found = [each for each in parts if each]
    if not found:
        return {}
    if "places" in found[0]:
        return {"places": torch.stack([each["places"] for each in found]).amin(dim=0)}
    columns = [_columns_of(each) for each in found]
    ids = torch.cat([each["ids"] for each in found])
    return {"ids": ids, **_nested({name: torch.cat([each[name] for each in columns]) for name in columns[0]})}


def only_rows(state: dict[Any, Any], own: range) -> dict[Any, Any]:
    """What a state has of some clients."""
    if "places" in state:
        places = torch.full_like(state["places"], _NONE)
        places[own.start : own.stop] = state["places"][own.start : own.stop]
        return {"places": places}
    if "ids" in state:
        rows = (state["ids"] >= own.start) & (state["ids"] < own.stop)
        kept = _nested({name: value[rows] for name, value in _columns_of(state).items()})
        return {"ids": state["ids"][rows], **kept}
    return {client: values for client, values in state.items() if client in own}
