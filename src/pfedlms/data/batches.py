"""The order in which a client uses its samples, and their augmentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.data.federated import FederatedData
from pfedlms.data.partition import client_sizes
from pfedlms.rng import device_words, permutation, stream, streams

Step = int | NDArray[np.int64]
"""The number of a local step: the same for all clients, or one for each."""

CROP = 4  # an image is moved by at most so many pixels
_LONG_SHUFFLE = 512  # from so many samples per client on, a shuffle is worth keeping for the next round


def shuffle(seed: int, client: int, epoch: int, samples: int) -> NDArray[np.int64]:
    return permutation(stream(seed, "batches", client, epoch), samples)


def batch_positions(
    seed: int, client: int, samples: int, first_step: int, steps: int, batch_size: int,
    shuffle: Callable[[int, int, int, int], NDArray[np.int64]] = shuffle,
) -> NDArray[np.int64]:  # fmt: skip
    """Positions `[steps, batch_size]` in a client's training set for local steps first_step, first_step + 1, …

    A client walks through one shuffle of its samples after another, without a gap: step s takes the entries
    s·batch .. (s+1)·batch − 1 of the endless row of shuffles. So every batch is full, also where a client has fewer
    samples than a batch, and any step can be computed without those before it.
    """
    first, count = first_step * batch_size, steps * batch_size
    epochs = range(first // samples, (first + count - 1) // samples + 1)
    walk = np.concatenate([shuffle(seed, client, epoch, samples) for epoch in epochs])
    start = first - epochs[0] * samples
    return walk[start : start + count].reshape(steps, batch_size)


def batches(seed: int, data: FederatedData) -> HostBatches | DeviceBatches:
    """Which samples clients use in their local steps, the same on every machine. They are drawn on the device of the
    data. Many short shuffles are faster drawn all at once, on a CPU too."""
    short = sum(data.samples) < _LONG_SHUFFLE * data.clients
    return DeviceBatches(seed, data) if data.x.is_cuda or short else HostBatches(seed, data)


class HostBatches:
    """Batches drawn with NumPy; a shuffle that two rounds share is drawn once."""

    def __init__(self, seed: int, data: FederatedData) -> None:
        self._train, self._prefetch = data.train, data.prefetch
        self._positions = partial(batch_positions, seed, shuffle=lru_cache(maxsize=2 * data.clients)(shuffle))

    def indices(self, clients: tuple[int, ...], first_step: Step, steps: int, batch_size: int) -> Tensor:
        """Samples of steps first_step, first_step + 1, …: int64 `[steps, clients, batch]`, on the data's device."""
        starts = np.broadcast_to(first_step, len(clients)).tolist()
        self._prefetch(clients)
        samples = [
            self._train[k][self._positions(k, len(self._train[k]), first, steps, batch_size)]
            for k, first in zip(clients, starts, strict=True)
        ]
        return torch.from_numpy(np.stack(samples, axis=1))


class DeviceBatches:
    """The same batches, drawn for all clients at once: keys are hashed, sorted and looked up on the device. All the
    shuffles of a round are in one row, ordered by client and epoch."""

    def __init__(self, seed: int, data: FederatedData) -> None:
        self._seed, self._device, self._data = seed, data.x.device, data
        self._sizes = client_sizes(data.train)
        self._clients: tuple[int, ...] = ()
        self._samples = torch.empty(0)

    def indices(self, clients: tuple[int, ...], first_step: Step, steps: int, batch_size: int) -> Tensor:
        ids, first, count = np.array(clients), first_step * batch_size, steps * batch_size
        sizes = self._sizes[ids]
        if clients != self._clients:
            self._data.prefetch(clients)
            self._samples = self._to_device(np.concatenate([self._data.train[client] for client in clients]))
            self._clients = clients
        epoch = first // sizes
        shuffles = (first + count - 1) // sizes - epoch + 1
        row = np.repeat(np.arange(len(ids)), shuffles)
        within = np.arange(len(row)) - np.repeat(np.cumsum(shuffles) - shuffles, shuffles)
        keys = streams(self._seed, "batches", ids[row], epoch[row] + within).view(np.int64)
        lengths = sizes[row]
        begins = np.cumsum(lengths) - lengths
        # Where a client's first sample of the round is in the row of shuffles, and where its samples are in `_samples`.
        walk = begins[np.cumsum(shuffles) - shuffles] + first - epoch * sizes
        table = self._to_device(np.stack([keys, lengths, begins]))
        places = self._to_device(np.stack([walk, np.cumsum(sizes) - sizes]))

        total = int(lengths.sum())
        shuffle = torch.repeat_interleave(table[1], output_size=total)
        position = torch.arange(total, device=self._device) - table[2][shuffle]
        words = device_words(table[0][shuffle], position)
        # Unsigned order: the lowest of signed numbers stands for the word 0.
        order = torch.argsort(words ^ torch.iinfo(torch.int64).min, stable=True)
        order = order[torch.argsort(shuffle[order], stable=True)]
        chosen = position[order][places[0].unsqueeze(1) + torch.arange(count, device=self._device)]
        samples = self._samples[places[1].unsqueeze(1) + chosen]
        return samples.view(len(ids), steps, batch_size).transpose(0, 1).contiguous()

    def _to_device(self, values: NDArray[np.int64]) -> Tensor:
        host = torch.from_numpy(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host


class Augmentation:
    """Random crops (an image moved by up to `CROP` pixels, zeros at the edge) and horizontal flips of training samples.

    The change of a sample is a pure function of (seed, client, place in the client's walk), so it is the same on every
    device and for every grouping of clients.
    """

    def __init__(self, seed: int, crop: bool, flip: bool) -> None:
        self._seed, self._crop, self._flip = seed, crop, flip

    def draws(self, clients: tuple[int, ...], first_step: Step, steps: int, batch_size: int, like: Tensor) -> Tensor:
        """Moves down and right and whether to flip, for every place of a plan: int64 `[steps, 3, clients, batch]`."""
        keys = torch.from_numpy(streams(self._seed, "augment", np.array(clients)).view(np.int64)).to(like.device)
        starts = torch.from_numpy(np.broadcast_to(first_step, len(clients)) * batch_size).to(like.device)
        places = starts.unsqueeze(1) + torch.arange(steps * batch_size, device=like.device)
        word = device_words(keys.unsqueeze(1), places).view(len(clients), steps, batch_size).transpose(0, 1)
        # 16 bits for each move: ⌊bits (2 CROP + 1) / 2^16⌋ − CROP.
        down, right = (((word >> bits & 0xFFFF) * (2 * CROP + 1) >> 16) - CROP for bits in (0, 16))
        flip = word >> 32 & 1
        return torch.stack([down * self._crop, right * self._crop, flip * self._flip], dim=1)

    @staticmethod
    def apply(x: Tensor, draws: Tensor) -> Tensor:
        """Images `x: [clients, batch, channels, height, width]` changed by `draws: [3, clients, batch]`."""
        height, width = x.shape[-2:]
        down, right, flip = (part.unsqueeze(-1) for part in draws)
        row = torch.arange(height, device=x.device) + down
        column = torch.arange(width, device=x.device)
        column = torch.where(flip > 0, width - 1 - column, column) + right
        inside = ((row >= 0) & (row < height)).unsqueeze(-1) & ((column >= 0) & (column < width)).unsqueeze(-2)
        place = row.clamp(0, height - 1).unsqueeze(-1) * width + column.clamp(0, width - 1).unsqueeze(-2)
        moved = x.flatten(-2).gather(-1, place.flatten(-2).unsqueeze(2).expand(*x.shape[:3], -1)).view_as(x)
        return torch.where(inside.unsqueeze(2), moved, 0.0)
