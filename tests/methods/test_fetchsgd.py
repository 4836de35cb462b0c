"""FetchSGD: whole runs against its definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from plain_client import signs, stream, word

from factories import digits
from plain_loops import CLIENTS, ROUNDS, SEED, SHARE, Loop, played


@pytest.mark.parametrize(("rows", "gain"), [(5, 1.0), (4, 0.7)])
def test_a_run_is_the_algorithm_in_numpy(rows: int, gain: float) -> None:
    """Algorithm 1 of Rothchild et al. on updates of local steps, weighted by N_k: Count Sketches up, momentum and the
    unsent rest in tables, the k largest estimates down, whose cells become zero in both. Of four rows the median is the
    second smallest."""
    loop = Loop(digits(CLIENTS))
    w, dim = loop.initial.numpy().copy(), len(loop.initial)
    columns, kept = int(0.1 * dim), int(0.02 * dim)
    keys = [stream(SEED, "fetchsgd-bucket", row) for row in range(rows)]
    buckets = np.array([[(word(key, i) >> 32) * columns >> 32 for i in range(dim)] for key in keys])
    flips = np.array([signs(stream(SEED, "fetchsgd-sign", row), dim) for row in range(rows)])
    u, e, every_row = np.zeros((rows, columns)), np.zeros((rows, columns)), np.arange(rows)[:, None]
    for phase in range(ROUNDS):
        start, mean = loop.initial.new_tensor(w), np.zeros((rows, columns))
        senders = loop.participants.of(phase)
        for k in senders:
            table = np.zeros((rows, columns))
            np.add.at(table, (every_row, buckets), flips * (loop.steps(start, k, phase) - start).numpy())
            mean += loop.weights[k].item() / loop.weights[list(senders)].sum().item() * table
        u = 0.9 * u + mean
        e = e + gain * u
        estimates = np.sort(flips * e[every_row, buckets], axis=0)[(rows - 1) // 2]
        sent = np.argsort(-np.abs(estimates), kind="stable")[:kept]
        w[sent] += estimates[sent]
        u[every_row, buckets[:, sent]] = e[every_row, buckets[:, sent]] = 0
    server = played("fetchsgd", participation=SHARE, rows=rows, columns=0.1, answer=0.02, gain=gain)["server"]
    for name, expected in (("model", w), ("velocity", u.ravel()), ("error", e.ravel())):
        np.testing.assert_allclose(server[name], expected, rtol=0, atol=2e-6)
    assert 0 < np.count_nonzero(w - loop.initial.numpy()) <= ROUNDS * kept
