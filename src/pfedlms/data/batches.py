"""The order in which a client sees its samples."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pfedlms.rng import permutation, stream


def batch_positions(
    seed: int, client: int, samples: int, first_step: int, steps: int, batch_size: int
) -> NDArray[np.int64]:
    """Positions `[steps, batch_size]` in a client's training set for local steps first_step, first_step + 1, …

    A client walks through one shuffle of its samples after another, without a gap: step s takes the entries
    s·batch .. (s+1)·batch − 1 of the endless row of shuffles. So every batch is full, also where a client has fewer
    samples than a batch, and any step can be computed without those before it.
    """
    return Shuffles(seed).positions(client, samples, first_step, steps, batch_size)


class Shuffles:
    """Batch positions of all clients of a run; a shuffle that two rounds share is drawn once, if `keep` is twice the
    clients."""

    def __init__(self, seed: int, keep: int = 1) -> None:
        self._seed = seed
        self._shuffle = lru_cache(maxsize=keep)(self._draw)

    def _draw(self, client: int, epoch: int, samples: int) -> NDArray[np.int64]:
        return permutation(stream(self._seed, "batches", client, epoch), samples)

    def positions(self, client: int, samples: int, first_step: int, steps: int, batch_size: int) -> NDArray[np.int64]:
        """See `batch_positions`."""
        first, count = first_step * batch_size, steps * batch_size
        epochs = range(first // samples, (first + count - 1) // samples + 1)
        walk = np.concatenate([self._shuffle(client, epoch, samples) for epoch in epochs])
        start = first - epochs[0] * samples
        return walk[start : start + count].reshape(steps, batch_size)
