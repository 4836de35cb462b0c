"""The walk of a client through its samples: shuffle after shuffle, without a gap, computable from anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.data import batch_positions


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (12, 4), (3, 8), (1, 5), (64, 64), (7, 1)])
def test_each_epoch_is_a_permutation(samples: int, batch: int) -> None:
    """The batches, laid end to end and cut every `samples` entries, are permutations; batches run over the seams."""
    steps = samples * 3  # three epochs of `batch` samples each at least, and a whole number of them
    walk = batch_positions(1, 0, samples, 0, steps, batch).reshape(-1, samples)
    assert len(walk) == 3 * batch
    for epoch in walk:
        assert sorted(epoch.tolist()) == list(range(samples))


def test_every_batch_is_full_also_with_fewer_samples_than_a_batch() -> None:
    positions = batch_positions(1, 0, 3, 0, 4, 8)
    assert positions.shape == (4, 8)
    for batch in positions:  # 8 of 3: each sample comes up twice at least and four times at most
        assert np.bincount(batch, minlength=3).min() >= 2
        assert np.bincount(batch, minlength=3).max() <= 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 30), st.integers(1, 10))
def test_any_start_gives_the_same_walk(samples: int, batch: int, first: int, steps: int) -> None:
    whole = batch_positions(3, 1, samples, 0, first + steps, batch)
    assert batch_positions(3, 1, samples, first, steps, batch).tolist() == whole[first:].tolist()


def test_a_late_step_needs_no_earlier_ones() -> None:
    """A billion steps in: an implementation that walks there would not come back."""
    positions = batch_positions(3, 1, 100, 10**9, 3, 50)  # 10⁹ · 50 is a whole number of epochs
    assert sorted(positions[:2].flatten().tolist()) == list(range(100))


@pytest.mark.parametrize("other", [(2, 0), (1, 1)])
def test_another_seed_or_client_walks_otherwise(other: tuple[int, int]) -> None:
    first, again = (batch_positions(1, 0, 50, 0, 2, 25).tolist() for _ in range(2))
    assert first == again
    assert batch_positions(*other, 50, 0, 2, 25).tolist() != first


def test_epochs_are_shuffled_anew() -> None:
    walk = batch_positions(1, 0, 50, 0, 4, 25).reshape(2, 50)
    assert walk[0].tolist() != walk[1].tolist()


def test_frozen_walk() -> None:
    """Epochs of (seed 7, "batches", client 2, epoch 0, 1, 2) by the plain-Python transcription in test_rng.py:
    [3, 1, 0, 2, 4], [0, 2, 1, 3, 4], [3, 4, 2, 0, 1]."""
    assert batch_positions(7, 2, 5, 0, 5, 3).tolist() == [[3, 1, 0], [2, 4, 0], [2, 1, 3], [4, 3, 4], [2, 0, 1]]
    assert batch_positions(7, 2, 5, 2, 2, 3).tolist() == [[2, 1, 3], [4, 3, 4]]
