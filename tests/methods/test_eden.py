"""EDEN against its dense definition. theory/test_estimators.py has the error that its paper states."""

from __future__ import annotations

from math import sqrt

import numpy as np
import plain_client as plain
import pytest
import torch

from definitions import hadamard, signs_of
from factories import cohort_of, exchange_of, hold, normal, task_of
from pfedlms.methods.eden import Codec

# Output levels of Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 1960, table 1.
CENTROIDS = {1: [0.7980], 3: [0.2451, 0.7560, 1.344, 2.152]}


def dense_estimate(x: np.ndarray, bits: int, seed: int, round: int, client: int) -> np.ndarray:
    """x̂ of one client from the definition: dense rotation, nearest centroid by comparing with all, everything
    float64."""
    levels = np.array([-c for c in reversed(CENTROIDS[bits])] + CENTROIDS[bits])
    parts, at, number = [], 0, 0
    while at < len(x):
        left = len(x) - at
        length = left if left < 1024 else 1 << left.bit_length() - 1
        padded = plain.padded(length)
        piece = np.zeros(padded)
        piece[:length] = x[at : at + length]
        rotation = hadamard(padded) * signs_of(padded, seed, "eden", round, client, number) / sqrt(padded)
        y, norm = rotation @ piece, np.linalg.norm(piece)
        q = levels[np.abs(sqrt(padded) * y[:, None] / norm - levels).argmin(axis=1)]
        parts.append((norm**2 / (q @ y) * (rotation.T @ q))[:length])
        at, number = at + length, number + 1
    return np.concatenate(parts)


@pytest.mark.parametrize(("dim", "bits", "within"), [(7, 1, 1e-5), (64, 1, 1e-5), (1100, 1, 1e-5), (64, 3, 1e-4)])
def test_an_estimate_is_that_of_the_dense_definition(dim: int, bits: int, within: float) -> None:
    """At one bit the size of the centroid cancels, so that the published two digits do not limit the comparison."""
    codec, x = Codec(dim, bits, seed=9), normal(2, dim, seed=4)
    decoded = codec.decode(*codec.encode(x, (3, 8), 5), [3, 8], 5)
    for row, client in enumerate((3, 8)):
        expected = dense_estimate(x[row].double().numpy(), bits, 9, 5, client)
        np.testing.assert_allclose(decoded[row].numpy(), expected, atol=within * float(x.norm()))


@pytest.mark.parametrize("bits", [1, 3])
def test_a_chunk_of_zeros_is_decoded_as_zeros(bits: int) -> None:
    x = torch.zeros(3, 1024 + 300)
    x[1, :1024] = normal(1024, seed=1)
    x[2, 1024:] = normal(300, seed=2)
    codec = Codec(x.shape[1], bits, seed=2)
    indices, scales = codec.encode(x, (0, 1, 2), 0)
    assert int(indices.max()) < 1 << bits
    assert (scales > 0).tolist() == [[False, False], [True, False], [False, True]]
    decoded = codec.decode(indices, scales, [0, 1, 2], 0)
    assert decoded.isfinite().all()
    assert not decoded[0].any()
    assert not decoded[1, 1024:].any()
    assert not decoded[2, :1024].any()


def test_the_server_reverses_the_rotation_of_each_client() -> None:
    """w' = w + Σ p_k x̂_k, with x̂_k from the dense definition; the clients are 2, 5 and 9."""
    dim, ids, samples = 1100, [2, 5, 9], [1, 6, 3]
    start, updates = normal(dim, seed=1), normal(3, dim, seed=2)
    task = task_of(dim, initial=start)
    cohort = cohort_of(start + updates, ids, samples, model=start)
    sent = (cohort.params - start).double().numpy()
    each = {client: dense_estimate(sent[row], 1, task.seed, 4, client) for row, client in enumerate(ids)}

    (after,), server = hold(exchange_of("eden", task), cohort, {"model": start}, round=4)
    expected = start.double().numpy() + (1 * each[2] + 6 * each[5] + 3 * each[9]) / 10
    np.testing.assert_allclose(server["model"].numpy(), expected, atol=2e-5)
    assert all(torch.equal(row, server["model"]) for row in (*after.params, *after.state["model"]))


def test_zero_counts_as_positive() -> None:
    """sign(0) = +1 everywhere: a rotated coordinate that is exactly zero takes the upper centroid."""
    codec = Codec(2, 1, seed=0)
    for round in range(20):
        indices, _ = codec.encode(torch.tensor([[1.0, 1.0]]), (0,), round)
        # H D (1, 1) is (±2, 0) or (0, ±2): one coordinate is zero, and its index is 1.
        assert 1 in indices[0].tolist()
