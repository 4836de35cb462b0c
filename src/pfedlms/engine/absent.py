"""What clients keep while they take no part, in tables with a row for each client.

Memory and disk are taken only by rows that are written. Tables of more than `LARGEST` bytes are one file, which the
system keeps in memory as far as there is room. In a run's folder this file, `clients.bin`, belongs to the checkpoint:
every row has three places, and a place that one of the last two checkpoints refers to is not written. So a checkpoint
costs what was written since the one before, and a process may end at any time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors

KEPT = ("params", "momentum", "buffers", "state")
LARGEST = 1 << 30  # bytes of tables in memory; all of them are written in every checkpoint
_PLACES, _NONE, _PAGE = 3, 255, 4096


class Absent:
    """The state of clients that take no part.

    Args:
        clients: how many there are.
        device: where tables are that are not in a file.
        example: makes one client as it is kept, which has the shapes of all.
    """

    def __init__(self, clients: int, device: torch.device, example: Callable[[], Cohort]) -> None:
        self.clients, self._device, self._make_example = clients, device, example
        self.folder: Path | None = None
        """Of the run, if it has one; a larger file than `LARGEST` is made there."""
        self._place: NDArray[np.uint8] = np.full(clients, _NONE, dtype=np.uint8)
        self._saved: list[NDArray[np.uint8]] = []
        self._tables: Tensors = {}
        self._maps: list[np.memmap[Any, Any]] = []

    @cached_property
    def _example(self) -> Cohort:
        return self._make_example().to(torch.device("cpu"))

    @property
    def in_file(self) -> bool:
        """Whether tables for all clients are too large for memory."""
        return self._device.type == "cpu" and self.clients * self._example.nbytes > LARGEST

    def has(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which of these clients are absent, of those that have taken part."""
        return np.not_equal(self._place[np.asarray(ids, dtype=np.int64)], _NONE)

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._place != _NONE)

    def put(self, kept: Cohort) -> None:
        """These clients are absent now."""
        self._open()
        ids = np.array(kept.ids)
        pinned = [saved[ids] for saved in self._saved]
        free = [np.all([own != place for own in pinned], axis=0) for place in range(_PLACES)]
        place = np.select(free, range(_PLACES)) if pinned else np.zeros(len(ids), dtype=np.int64)
        rows = to_device(torch.from_numpy(place * self.clients + ids), self._device)
        for name, value in _columns(kept).items():
            self._tables[name].index_copy_(0, rows, value.to(self._device))
        self._place[ids] = place

    def drop(self, ids: Sequence[int]) -> None:
        """These clients are not absent any more."""
        self._place[np.asarray(ids, dtype=np.int64)] = _NONE

    def take(self, ids: Sequence[int], device: torch.device) -> dict[str, Any]:
        """What these clients keep, by the names of `KEPT`."""
        self._open()
        chosen = np.asarray(ids, dtype=np.int64)
        rows = torch.from_numpy(self._place[chosen].astype(np.int64) * self.clients + chosen)
        rows = to_device(rows, self._device)
        return _nested({name: table.index_select(0, rows).to(device) for name, table in self._tables.items()})

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """As a checkpoint has it: the rows of all absent clients, or where they are in the run's file."""
        if not len(self.ids):
            return {}
        if self.in_file and self.folder is not None:
            for each in self._maps:
                each.flush()
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

    # --- tables

    def _open(self) -> None:
        if self._tables:
            return
        examples = _columns(self._example)
        if not self.in_file:
            # A row has one place: checkpoints have copies.
            self._tables = {
                name: torch.empty(self.clients, *one.shape[1:], dtype=one.dtype, device=self._device)
                for name, one in examples.items()
            }
            return
        rows = _PLACES * self.clients
        sizes = [-(-rows * one.nbytes // _PAGE) * _PAGE for one in examples.values()]
        with _file(self.folder) as file:
            os.ftruncate(file.fileno(), sum(sizes))
            for place, (name, one) in enumerate(examples.items()):
                shape, start = (rows, *one.shape[1:]), sum(sizes[:place])
                if one.nbytes:
                    self._maps.append(np.memmap(file, one.numpy().dtype, "r+", start, shape))
                    self._tables[name] = torch.from_numpy(self._maps[-1])
                else:
                    self._tables[name] = torch.empty(shape, dtype=one.dtype)


def _file(folder: Path | None) -> Any:
    if folder is None:
        return tempfile.TemporaryFile()
    path = folder / "clients.bin"
    path.touch()
    return open(path, "r+b")


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
