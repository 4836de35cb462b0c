"""The order in which a client sees its samples."""

from __future__ import annotations

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
    first, count = first_step * batch_size, steps * batch_size
    epochs = range(first // samples, (first + count - 1) // samples + 1)
    walk = np.concatenate([permutation(stream(seed, "batches", client, epoch), samples) for epoch in epochs])
    start = first - epochs[0] * samples
    return walk[start : start + count].reshape(steps, batch_size)
