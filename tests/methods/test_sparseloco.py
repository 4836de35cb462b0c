"""SparseLoCo: two rounds in plain Python."""

from __future__ import annotations

import numpy as np
import torch

from factories import cohort_of, hold, method_of, normal, task_of

LAYERS, CHUNK, DENSITY, DECAY, GAIN = (11, 6), 4, 0.5, 0.75, 0.5
CHUNKS = [(0, 4), (4, 8), (8, 11), (11, 15), (15, 17)]
"""First and last entry: the last chunk of a layer is shorter."""


def compress(x: np.ndarray) -> np.ndarray:
    """Q(Top-k(x)) by its definition, dense: two of four entries, one of three, one of two."""
    kept: list[int] = []
    for first, last in CHUNKS:
        order = sorted(range(first, last), key=lambda i: (-abs(x[i]), i))
        kept += order[: int(DENSITY * (last - first))]
    out = np.zeros(len(x), np.float32)
    for first, last in ((0, 11), (11, 17)):
        own = [i for i in kept if first <= i < last]
        m = np.mean([abs(float(x[i])) for i in own])
        for lowest, highest in ((-np.inf, -m), (-m, 0), (0, m), (m, np.inf)):
            members = [i for i in own if lowest <= x[i] < highest]
            for i in members:
                out[i] = np.float32(np.mean([float(x[j]) for j in members]))
    return out


def test_two_rounds_by_hand() -> None:
    task, samples = task_of(*LAYERS, clients=3, initial=normal(17, seed=9)), [1, 2, 5]
    own = method_of("sparseloco", task, density=DENSITY, chunk=CHUNK, decay=DECAY, gain=GAIN)
    w = task.initial.numpy()
    server, residuals, residual = own.server_start(), np.zeros((3, 17), np.float32), np.zeros(17, np.float32)
    cohort = own.client_start(cohort_of(task.initial.expand(3, -1).clone(), samples=samples))
    for round in range(2):
        updates = normal(3, 17, seed=round).numpy()
        trained = (w + updates).astype(np.float32)
        x = trained - w + np.float32(DECAY) * residuals
        sent = np.stack([compress(row) for row in x])
        residuals = x - sent
        mean = (sent.astype(np.float64) * np.array(samples)[:, None]).sum(axis=0) / 8
        y = (GAIN * mean + DECAY * residual).astype(np.float32)
        residual, w = y - compress(y), w + compress(y)
        moved = cohort_of(torch.from_numpy(trained), samples=samples).with_state(**cohort.state)
        (cohort,), server = hold(own.exchanges[0], moved, server, round=round)
        np.testing.assert_allclose(cohort.state["residual"], residuals, rtol=0, atol=1e-6)
        np.testing.assert_allclose(server["residual"], residual, rtol=0, atol=1e-6)
        np.testing.assert_allclose(server["model"], w, rtol=0, atol=1e-6)
        assert torch.equal(cohort.params, server["model"].expand(3, -1))
