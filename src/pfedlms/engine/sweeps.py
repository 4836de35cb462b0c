"""All samples of some clients, in batches: what an evaluation goes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.data.federated import FederatedData
from pfedlms.data.partition import Indices

_BATCH = 256  # samples of a client
_TOKENS = 4096  # of windows of tokens, each of which has an output per entry of the vocabulary
_SHORT, _FEW = 1 << 23, 32  # numbers of a batch of all clients, and batches, that a GPU is soon through with


class Sweeps:
    """Finds the samples of clients. On a GPU the last ones are kept: to find them takes longer than to use them."""

    def __init__(self, data: FederatedData) -> None:
        self._data = data
        self._kept: dict[int, tuple[Any, tuple[int, ...], Tensor]] = {}

    def places(self, ids: tuple[int, ...], held: Sequence[Indices]) -> Tensor:
        """Every client's samples of `held` and, in a second part, 1 where there is one: `[1, 2, clients, most]`."""
        kept = self._kept.get(id(held))
        if kept is None or kept[0] is not held or kept[1] != ids:
            lengths = np.array([len(held[client]) for client in ids])
            places = np.zeros((1, 2, len(ids), int(lengths.max())), dtype=np.int64)
            for row, client in enumerate(ids):
                places[0, 0, row, : lengths[row]] = held[client]
                places[0, 1, row, : lengths[row]] = 1
            kept = held, ids, to_device(torch.from_numpy(places), self._data.x.device)
            if self._data.x.is_cuda:
                self._kept = {**dict(list(self._kept.items())[-3:]), id(held): kept}
        return kept[2]

    def batches(self, places: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Samples and targets `[clients, batch, …]`, and a mask: False where a client has no more samples."""
        for own in torch.split(places[0], self._most, dim=2):
            yield samples_at(self._data, own[0]), self._data.y[own[0]], own[1] > 0

    def are_short(self, places: Tensor) -> bool:
        """Whether the host takes longer to launch an evaluation of small models than a GPU to compute it."""
        clients, most = places.shape[2:]
        return clients * self._most * self._data.x[0].numel() <= _SHORT and most <= _FEW * self._most

    @property
    def _most(self) -> int:
        """Samples of a client in a batch."""
        positions = self._data.positions
        return _BATCH if positions == 1 else max(1, _TOKENS // positions)


def samples_at(data: FederatedData, index: Tensor) -> Tensor:
    """Samples `[clients, batch, …]` by `index: [clients, batch]`; whole rows are copied faster than entries."""
    return data.x.index_select(0, index.flatten()).view(*index.shape, *data.shape)
