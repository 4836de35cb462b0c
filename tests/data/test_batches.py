"""Batches: every client takes its samples in one shuffled order after another, from any step on; and augmentation."""

from __future__ import annotations

from itertools import product
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.data import FederatedData, batch_positions
from pfedlms.data.batches import Augmentation, DeviceBatches, HostBatches


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 30), st.integers(1, 10))
def test_batches_are_one_permutation_after_another(samples: int, batch: int, first: int, steps: int) -> None:
    """A batch may span two epochs; the last epoch may be incomplete."""
    whole = batch_positions(3, 1, samples, 0, first + steps, batch)
    assert batch_positions(3, 1, samples, first, steps, batch).tolist() == whole[first:].tolist()
    for start in range(0, whole.size, samples):
        epoch = whole.ravel()[start : start + samples].tolist()
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(samples))


def test_frozen_batches() -> None:
    """Epochs of (seed 7, "batches", client 2, epoch 0, 1, 2) by the plain-Python transcription in test_rng.py:
    [3, 1, 0, 2, 4], [0, 2, 1, 3, 4], [3, 4, 2, 0, 1]."""
    assert batch_positions(7, 2, 5, 0, 5, 3).tolist() == [[3, 1, 0], [2, 4, 0], [2, 1, 3], [4, 3, 4], [2, 0, 1]]


@pytest.fixture(scope="module")
def data() -> FederatedData:
    """Clients with 1, 3, 64, 65 and 2600 samples, scattered over one pool."""
    sizes = (1, 3, 64, 65, 2600)
    train = np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    x = torch.zeros(sum(sizes), 1)
    return FederatedData(x, torch.zeros(sum(sizes), dtype=torch.int64), tuple(train), tuple(train), 1)


@pytest.mark.parametrize("kind", [HostBatches, DeviceBatches])
@pytest.mark.parametrize("clients", [(0, 1, 2, 3, 4), (4,), (0,), (1, 3)])
@pytest.mark.parametrize(("first", "steps", "size"), [(0, 3, 64), (7, 20, 64), (41, 2, 1), (10**9, 4, 32)])
def test_batches_of_many_clients_are_those_of_each_client(
    kind: type[HostBatches | DeviceBatches], clients: tuple[int, ...], first: int, steps: int, size: int,
    data: FederatedData,
) -> None:  # fmt: skip
    expected = [data.train[k][batch_positions(5, k, data.samples[k], first, steps, size)] for k in clients]
    got = kind(5, data).indices(clients, first, steps, size)
    assert got.dtype == torch.int64
    assert got.shape == (steps, len(clients), size)
    assert np.array_equal(got.numpy(), np.stack(expected, axis=1))


def test_cached_shuffles_of_host_batches_are_not_mixed_up(data: FederatedData) -> None:
    cached = HostBatches(5, data)
    for clients, first in [((2, 3), 0), ((3,), 10), ((2, 3), 10), ((0, 1, 2), 0), ((2, 3), 0)]:
        assert torch.equal(cached.indices(clients, first, 10, 8), HostBatches(5, data).indices(clients, first, 10, 8))


def draws(clients: tuple[int, ...], first: int, steps: int, size: int, *, seed: int = 2, **kind: bool) -> torch.Tensor:
    return Augmentation(seed, **{"crop": True, "flip": True, **kind}).draws(clients, first, steps, size, torch.empty(0))


def test_draws_do_not_depend_on_the_grouping_of_clients_and_steps() -> None:
    whole = draws((0, 1, 5), 0, 6, 8)
    assert whole.shape == (6, 3, 3, 8)
    assert whole.dtype == torch.int64
    for (row, client), step in product(enumerate((0, 1, 5)), range(6)):
        assert torch.equal(draws((client,), step, 1, 8)[0, :, 0], whole[step, :, row])
    assert torch.equal(draws((5, 1), 2, 3, 8), whole[2:5, :, [2, 1]])
    assert not torch.equal(draws((0, 1, 5), 0, 6, 8, seed=3), whole)


def test_crops_and_flips_are_uniform_and_independent() -> None:
    """All 9 · 9 · 2 outcomes equally often: Pearson's statistic within five standard deviations of its mean."""
    down, right, flip = draws(tuple(range(20)), 3, 50, 64).transpose(0, 1).flatten(1).numpy()
    assert (down.min(), down.max(), right.min(), right.max()) == (-4, 4, -4, 4)
    assert set(flip.tolist()) == {0, 1}
    counts = np.bincount(((down + 4) * 9 + right + 4) * 2 + flip, minlength=162)
    expected = len(down) / 162
    assert abs(((counts - expected) ** 2 / expected).sum() - 161) < 5 * sqrt(2 * 161)


@pytest.mark.parametrize(("crop", "flip"), [(True, False), (False, True)])
def test_crops_and_flips_are_drawn_separately(crop: bool, flip: bool) -> None:
    both, alone = draws((0, 3), 1, 4, 16), draws((0, 3), 1, 4, 16, crop=crop, flip=flip)
    assert torch.equal(alone[:, :2], both[:, :2] * crop)
    assert torch.equal(alone[:, 2], both[:, 2] * flip)
    assert alone.any()


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 9), (2, 3, 4)])
def test_augmentation_pads_slices_and_mirrors_images(shape: tuple[int, int, int]) -> None:
    """Also images that are smaller than the largest shift, of which nothing is left."""
    _, height, width = shape
    kinds = torch.tensor(list(product(range(-4, 5), range(-4, 5), (0, 1))))
    draws = torch.stack([kinds, kinds.flip(0)]).permute(2, 0, 1)  # all 162 kinds, in another order for each client
    x = torch.randn(2, len(kinds), *shape, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    got = Augmentation.apply(x, draws)
    for client, sample in product(range(2), range(len(kinds))):
        down, right, flip = draws[:, client, sample].tolist()
        padded = np.pad(x[client, sample].numpy(), ((0, 0), (4, 4), (4, 4)))
        expected = padded[:, 4 + down : 4 + down + height, 4 + right : 4 + right + width]
        assert np.array_equal(got[client, sample].numpy(), expected[:, :, ::-1] if flip else expected)
    assert torch.equal(x, before)
