"""Sums, pooled statistics and votes: by hand, by plain loops and by brute force."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.aggregate import (
    SignVote,
    Vote,
    WeightedMean,
    limit_weights,
    pool_statistics,
    weighted_medians,
)
from pfedlms.backend import torch_threads
from pfedlms.quantise import statistics


def rounded_mean(samples: list[int], values: np.ndarray) -> np.ndarray:
    """One client after another, every operation rounded to float64."""
    total = np.zeros(values.shape[1])
    for weight, own in zip(samples, values, strict=True):
        total = total + own.astype(np.float64) * float(weight)
    return total / sum(samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, 9000])
def test_a_weighted_mean_has_the_bits_of_a_plain_loop(size: int, dtype: torch.dtype) -> None:
    """Around the size of the parts that stay in the cache, of numbers whose sum depends on its order, in any groups."""
    random = torch.Generator().manual_seed(0)
    samples = [3, 1, 1000003, 7]
    spread = 10 ** (6 * torch.rand(4, size, generator=random, dtype=torch.float64) - 3)
    values = (torch.randn(4, size, generator=random, dtype=torch.float64) * spread).to(dtype)
    got = WeightedMean(size).add(samples, values).result()
    assert got.dtype == torch.float64
    assert np.array_equal(got.numpy(), rounded_mean(samples, values.numpy()))
    assert torch.equal(WeightedMean(size).add(samples[:1], values[:1]).add(samples[1:], values[1:]).result(), got)
    assert torch.equal(WeightedMean(size).add(samples, torch.hstack([values, -values])[:, :size]).result(), got)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3e38])), min_size=1, max_size=9))
def test_a_weighted_median_is_the_lower_middle_of_values_repeated_by_weight(clients: list[tuple[int, float]]) -> None:
    samples, values = zip(*clients, strict=True)
    drawn = sorted(value for weight, value in clients for _ in range(weight) if value > 0)
    (got,) = weighted_medians(samples, np.array(values, dtype=np.float32)[:, None])
    assert got == np.float32(drawn[(len(drawn) - 1) // 2] if drawn else 0)


def test_medians_of_columns_by_hand() -> None:
    """Three clients of weight 1, 2 and 4: by hand; where all are zero, of either sign, it is +0; also of none."""
    values = np.float32([[1, 5, 0, -0.0], [3, 0, 0, 0], [2, 1, 9, -0.0]])
    got = weighted_medians([1, 2, 4], values)
    assert (got.dtype, got.tobytes()) == (np.float32, np.float32([2, 1, 9, 0]).tobytes())
    assert weighted_medians([], np.zeros((0, 2), np.float32)).tolist() == [0, 0]
    values[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"values\[1, 2\]: got nan, expected a finite number of at least 0"):
        weighted_medians([1, 2, 4], values)


def test_pooled_statistics_are_those_of_all_entries_together() -> None:
    """The weight N_k of a client is N_k copies of its entries; layers do not mix."""
    samples, sizes = (3, 1, 6), (4, 9)
    sketched = np.random.default_rng(1).normal(size=(3, 13)) * [[1], [5], [0.2]] + [[0], [2], [-3]]
    means, variances = statistics(torch.tensor(sketched), sizes)
    mean, deviation = pool_statistics(samples, means.numpy(), variances.numpy())
    for layer, own in enumerate((slice(0, 4), slice(4, 13))):
        pooled = np.concatenate([np.tile(row[own], n) for row, n in zip(sketched, samples, strict=True)])
        assert mean[layer] == pytest.approx(pooled.mean(), rel=1e-6)
        assert deviation[layer] == pytest.approx(pooled.std(), rel=1e-6)


def tally(ballots: list[tuple[list[int], int]], levels: int) -> Vote:
    vote = Vote(len(ballots[0][0]), levels)
    for symbols, weight in ballots:
        vote.add(np.array(symbols, dtype=np.uint8), weight)
    return vote


def vote_by_formula(ballots: list[tuple[list[int], int]], levels: int) -> list[int]:
    """q̃(i) = #{t : Σ_k N_k b_t^k(i) ≥ 0} with b = ±1, literally."""
    return [
        sum(sum(n * (1 if symbols[i] >= t else -1) for symbols, n in ballots) >= 0 for t in range(1, levels + 1))
        for i in range(len(ballots[0][0]))
    ]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_vote_is_the_formula(levels: int, size: int, data: st.DataObject) -> None:
    symbols = st.lists(st.integers(0, levels), min_size=size, max_size=size)
    weight = st.one_of(st.integers(1, 4), st.integers(1, 2**31))
    ballots = data.draw(st.lists(st.tuples(symbols, weight), min_size=1, max_size=6))
    result = tally(ballots, levels).result()
    assert result.dtype == np.uint8
    assert result.tolist() == vote_by_formula(ballots, levels)


def test_counters_grow_with_the_total_weight_only() -> None:
    """5 coordinates × 3 thresholds: one byte a counter up to N = 255, two up to 65,535, four up to 2³² − 1, then
    eight."""
    vote = Vote(5, 3)
    ballot = np.array([3, 0, 1, 2, 3], dtype=np.uint8)
    sizes = []
    for weight in (255, 1, 65_535 - 256, 1, 2**31, 2**32 - 1 - 65_536 - 2**31, 1):
        vote.add(ballot, weight)
        sizes.append((vote.total, vote.counts.nbytes))
    expected_totals = [255, 256, 65_535, 65_536, 2**31 + 65_536, 2**32 - 1, 2**32]
    assert sizes == list(zip(expected_totals, (15, 30, 30, 60, 60, 60, 120), strict=True))
    assert vote.result().tolist() == [3, 0, 1, 2, 3]
    # Nothing was lost while the counters grew: 2³² − 1 against it is not enough, 2³² is a tie, one more decides.
    against = np.array([0, 3, 0, 0, 0], dtype=np.uint8)
    vote.add(against, 2**32 - 1)
    assert vote.result().tolist() == [3, 0, 1, 2, 3]
    vote.add(against, 1)
    assert vote.result().tolist() == [3, 3, 1, 2, 3]
    vote.add(against, 1)
    assert vote.result().tolist() == [0, 3, 0, 0, 0]


def packed(rows: np.ndarray) -> np.ndarray:
    """Rows of 0 and 1 as bytes, by Python's whole numbers."""
    width = (rows.shape[1] + 7) // 8
    numbers = [sum(int(bit) << place for place, bit in enumerate(row)) for row in rows]
    return np.array([list(number.to_bytes(width, "little")) for number in numbers], dtype=np.uint8)


@pytest.mark.parametrize("sizes", [(1,), (8, 8), (3, 0, 6), (2048, 5, 2043), (5000, 1, 4100), (7, 2048, 2048)])
@pytest.mark.parametrize("heaviest", [3, 200, 2**40])
def test_a_vote_on_packed_signs_is_the_formula(sizes: tuple[int, ...], heaviest: int) -> None:
    """In Python's whole numbers: +1 where those for it weigh half or more; a weight of 0 is no vote. Some are added
    first, the others behind them."""
    draw = np.random.default_rng(len(sizes) + heaviest % 97)
    bits = draw.integers(0, 2, (6, sum(sizes)), dtype=np.uint8)
    weights = draw.integers(0, heaviest + 1, (6, len(sizes)))
    weights[:, -1] = 0
    layers = np.repeat(np.arange(len(sizes)), sizes)
    each = weights[:, layers].astype(object)
    expected = [2 * int(up) >= int(total) for up, total in zip((each * bits).sum(0), each.sum(0), strict=True)]
    at_once, in_parts = SignVote(sizes), SignVote(sizes)
    at_once.add(packed(bits), weights)
    for rows in (slice(2), slice(2, 6)):
        in_parts.add(packed(bits[rows]), weights[rows])
    assert at_once.result().tolist() == in_parts.result().tolist() == packed(np.array([expected]))[0].tolist()


def test_a_vote_on_packed_signs_is_the_same_with_several_threads() -> None:
    size = 1 << 17
    bits = np.random.default_rng(1).integers(0, 2, (9, size), dtype=np.uint8)
    weights, vote = np.arange(1, 10)[:, None].repeat(2, axis=1), SignVote([size - 1001, 1001])
    with torch_threads(3):
        vote.add(np.packbits(bits, axis=1, bitorder="little"), weights)
        got = vote.result()
    assert np.unpackbits(got, bitorder="little").tolist() == (2 * np.arange(1, 10) @ bits.astype(int) >= 45).tolist()


def test_packed_votes_of_another_size_are_refused() -> None:
    one = np.zeros((1, 2), np.uint8)
    for ballots in (one[:, :1], one[0], one.astype(np.int8)):
        with pytest.raises(ValueError, match=r"vote: got .*expected uint8 of shape \[clients, 2\]"):
            SignVote([5, 4]).add(ballots, np.array([[1, 1]]))


def test_limited_weights_by_trying_every_limit() -> None:
    """c by brute force: the largest whole number for which no client has more than its share; where there is none, all
    weigh what the lightest does."""
    random = np.random.default_rng(3)
    for _ in range(300):
        samples = random.integers(1, 60, size=random.integers(1, 7)).tolist()
        share = Fraction(int(random.integers(1, 20)), 20)
        fits = [c for c in range(1, max(samples) + 1) if c <= share * sum(min(n, c) for n in samples)]
        got = limit_weights(samples, float(share))
        c = max(fits) if fits else min(samples)
        assert got == [min(n, c) for n in samples]
        if share * len(samples) >= 1:
            assert max(got) <= share * sum(got)
        elif share < 1:
            assert len(set(got)) == 1


def test_a_share_of_one_is_no_limit_and_decimals_are_exact() -> None:
    assert limit_weights([5, 1 << 32, 7], 1.0) == [5, 1 << 32, 7]
    assert limit_weights([], 0.5) == []
    assert limit_weights([7, 3], 0.7) == [7, 3]  # 0.7 in binary is a little less, and 7 of 10 is not more
    assert limit_weights([30, 30, 30, 10], 0.3) == [30, 30, 30, 10]
