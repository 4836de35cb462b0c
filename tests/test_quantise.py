"""Statistics, thresholds, symbols and the vote: by hand, by exact arithmetic and by brute force."""

from __future__ import annotations

import struct
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.models.layout import Layer, Layout
from pfedlms.pull import Pull
from pfedlms.quantise import (
    narrowest_interval,
    normal_quantiles,
    statistics,
    symbols_of,
    thresholds_of,
)
from pfedlms.sketch import Sketch


def to_float32(value: float) -> float:
    """Round a double to single precision, without NumPy or torch."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


# --- statistics
# ---------------------------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    sketched = torch.tensor([[1.0, 3.0, 2.0, 2.0, 5.0], [4.0, 4.0, -1.0, 0.0, 1.0]])
    means, variances = statistics(sketched, (2, 3))
    assert means.dtype == variances.dtype == torch.float32
    assert means.tolist() == [[2.0, 3.0], [4.0, 0.0]]
    assert variances.tolist() == [[1.0, 2.0], [0.0, to_float32(2 / 3)]]


def test_statistics_of_one_entry() -> None:
    means, variances = statistics(torch.tensor([[7.5]]), (1,))
    assert (means.item(), variances.item()) == (7.5, 0.0)


def test_statistics_are_taken_in_float64() -> None:
    """8192 and its float32 neighbour 8192 + 2⁻¹⁰: their mean is no float32, their variance is 2⁻²² exactly."""
    means, variances = statistics(torch.tensor([[8192.0, 8192.0 + 2**-10]]), (2,))
    assert variances.item() == 2.0**-22
    assert means.item() == to_float32(8192.0 + 2**-11)


def test_pooled_statistics_by_hand() -> None:
    """N = (1, 3), m = (0, 4), s = (1, 2): μ̄ = 3, σ̄² = (1 (1 + 9) + 3 (2 + 1)) / 4 = 4.75."""
    mean, deviation = pool_statistics((1, 3), np.float32([[0], [4]]), np.float32([[1], [2]]))
    assert mean.dtype == deviation.dtype == np.float32
    assert mean.tolist() == [3.0]
    assert deviation.tolist() == [to_float32(4.75**0.5)]


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


def test_pooled_sums_run_in_the_order_of_the_clients() -> None:
    """Doubles near 10¹⁶ are 2 apart: (big + 1) − big = 0, but (big − big) + 1 = 1. Both ends must take the same
    order."""
    big = np.float32(1e16)
    zeros = np.zeros((3, 1), dtype=np.float32)
    assert pool_statistics((1, 1, 1), np.array([[big], [1], [-big]], dtype=np.float32), zeros)[0].tolist() == [0.0]
    in_other_order = pool_statistics((1, 1, 1), np.array([[big], [-big], [1]], dtype=np.float32), zeros)[0]
    assert in_other_order.tolist() == [to_float32(1 / 3)]


# --- thresholds
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2, 7, 255])
def test_quantiles_are_float64_quantiles_rounded_once(levels: int) -> None:
    """Υ(z_t) = t/(T+1), solved by bisection of the normal distribution function in float64."""
    quantiles = normal_quantiles(levels)
    assert quantiles.dtype == np.float32
    assert len(quantiles) == levels
    for t, quantile in enumerate(quantiles, start=1):
        low, high = -9.0, 9.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if NormalDist().cdf(middle) < t / (levels + 1) else (low, middle)
        assert quantile == pytest.approx(low, rel=1e-7, abs=1e-9)


def test_quantiles_of_seven_thresholds() -> None:
    """Φ⁻¹(k/8) from a table of the normal distribution."""
    assert normal_quantiles(7) == pytest.approx(
        [-1.1503494, -0.6744898, -0.3186394, 0, 0.3186394, 0.6744898, 1.1503494], abs=1e-7
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(-100, 100, width=32), st.floats(0, 100, width=32), st.integers(1, 31))
def test_thresholds_take_float32_values_through_one_float64_sum(mean: float, deviation: float, levels: int) -> None:
    """τ_t = float32(float64(μ̄ + σ̄ z_t)): the product of two float32 is exact in float64, so one sum is rounded, then
    cut to float32. Here in exact fractions and struct."""
    quantiles = [to_float32(NormalDist().inv_cdf(t / (levels + 1))) for t in range(1, levels + 1)]
    expected = [to_float32(float(Fraction(mean) + Fraction(deviation) * Fraction(z))) for z in quantiles]
    tau = thresholds_of(np.float32([mean]), np.float32([deviation]), normal_quantiles(levels))
    assert tau.dtype == np.float32
    assert tau.tolist() == [expected]


def test_thresholds_have_a_row_for_each_layer() -> None:
    tau = thresholds_of(np.float32([1, 10]), np.float32([2, 0.5]), np.float32([-1, 0, 1]))
    assert tau.tolist() == [[-1.0, 1.0, 3.0], [9.5, 10.0, 10.5]]


def test_narrowest_interval() -> None:
    """The middle intervals of a normal distribution are the narrowest; one threshold has no interval."""
    assert narrowest_interval(normal_quantiles(7)) == pytest.approx(0.3186394, abs=1e-6)
    assert narrowest_interval(np.float32([0])) == float("inf")


# --- symbols
# ------------------------------------------------------------------------------------------------------------


def test_symbols_by_hand() -> None:
    """Bins are half open and equality goes up; each layer has its own thresholds."""
    tau = torch.tensor([[-1.0, 0.0, 2.0], [10.0, 20.0, 30.0]])
    below = float(np.nextafter(np.float32(2), np.float32(0)))
    sketched = torch.tensor([[-5.0, -1.0, -0.5, 0.0, below, 2.0, 9.0, 9.0, 10.0, 30.0]])
    symbols = symbols_of(sketched, tau, (7, 3))
    assert symbols.dtype == torch.uint8
    assert symbols.tolist() == [[0, 1, 1, 2, 2, 3, 3, 0, 1, 3]]


def test_symbols_reach_255() -> None:
    tau = torch.arange(255.0)[None]
    assert symbols_of(torch.tensor([[-1.0, 0.0, 253.5, 254.0, 1e9]]), tau, (5,)).tolist() == [[0, 1, 254, 255, 255]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_symbols_count_the_thresholds_at_or_below(data: st.DataObject) -> None:
    value = st.integers(-4, 4).map(lambda n: n / 2)  # a coarse grid, so that equality is common
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    levels, clients = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    tau = [sorted(data.draw(st.lists(value, min_size=levels, max_size=levels))) for _ in sizes]
    rows = [data.draw(st.lists(value, min_size=sum(sizes), max_size=sum(sizes))) for _ in range(clients)]
    layer = [index for index, m in enumerate(sizes) for _ in range(m)]
    expected = [[sum(y >= t for t in tau[layer[i]]) for i, y in enumerate(row)] for row in rows]
    assert symbols_of(torch.tensor(rows), torch.tensor(tau), sizes).tolist() == expected


# --- vote
# ---------------------------------------------------------------------------------------------------------------


def tally(ballots: list[tuple[list[int], int]], levels: int) -> Vote:
    vote = Vote(len(ballots[0][0]), levels)
    for symbols, weight in ballots:
        vote.add(np.array(symbols, dtype=np.uint8), weight)
    return vote


def brute_force(ballots: list[tuple[list[int], int]], levels: int) -> list[int]:
    """q̃(i) = #{t : Σ_k N_k b_t^k(i) ≥ 0} with b = ±1, literally."""
    return [
        sum(sum(n * (1 if symbols[i] >= t else -1) for symbols, n in ballots) >= 0 for t in range(1, levels + 1))
        for i in range(len(ballots[0][0]))
    ]


def upper_median(ballots: list[tuple[list[int], int]]) -> list[int]:
    """The largest symbol such that those at or above it weigh at least half."""
    result = []
    for i in range(len(ballots[0][0])):
        total, above = sum(n for _, n in ballots), 0
        for symbol, n in sorted(((symbols[i], n) for symbols, n in ballots), reverse=True):
            above += n
            if 2 * above >= total:
                result.append(symbol)
                break
    return result


BALLOTS = st.integers(1, 9).flatmap(
    lambda levels: st.tuples(
        st.just(levels),
        st.integers(1, 4).flatmap(
            lambda size: st.lists(
                st.tuples(
                    st.lists(st.integers(0, levels), min_size=size, max_size=size),
                    st.one_of(st.integers(1, 4), st.integers(1, 2**31)),
                ),
                min_size=1,
                max_size=6,
            )
        ),
    )
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(BALLOTS)
def test_vote_is_the_formula_and_the_upper_weighted_median(case: tuple[int, list[tuple[list[int], int]]]) -> None:
    levels, ballots = case
    result = tally(ballots, levels).result()
    assert result.dtype == np.uint8
    assert result.tolist() == brute_force(ballots, levels) == upper_median(ballots)


def test_ties_go_up() -> None:
    """Weights 2 and 2, symbols 0 and 3: every threshold is a tie."""
    assert tally([([0, 3, 1], 2), ([3, 0, 1], 2)], 3).result().tolist() == [3, 3, 1]
    assert tally([([0, 3, 1], 3), ([3, 0, 1], 2)], 3).result().tolist() == [0, 3, 1]


def test_one_client_votes_for_itself() -> None:
    assert tally([([0, 1, 2, 3], 17)], 3).result().tolist() == [0, 1, 2, 3]


def test_the_order_of_ballots_does_not_matter() -> None:
    ballots = [([0, 3, 2], 300), ([1, 0, 3], 70_000), ([3, 2, 0], 5), ([2, 2, 2], 69_900)]
    assert tally(ballots, 3).result().tolist() == tally(ballots[::-1], 3).result().tolist() == brute_force(ballots, 3)


def test_result_can_be_asked_for_again() -> None:
    vote = tally([([0, 3], 1)], 3)
    assert vote.result().tolist() == vote.result().tolist() == [0, 3]


def test_counters_grow_with_the_total_weight_only() -> None:
    """5 coordinates × 3 thresholds: one byte a counter up to N = 255, two up to 65,535, four up to 2³² − 1, then
    eight."""
    vote = Vote(5, 3)
    ballot = np.array([3, 0, 1, 2, 3], dtype=np.uint8)
    sizes = []
    for weight in (255, 1, 65_535 - 256, 1, 2**31, 2**32 - 1 - 65_536 - 2**31, 1):
        vote.add(ballot, weight)
        sizes.append((vote.total, vote.nbytes))
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


def test_memory_does_not_grow_with_the_number_of_clients() -> None:
    vote = Vote(100, 7)
    before = vote.nbytes
    for _ in range(250):
        vote.add(np.full(100, 3, dtype=np.uint8), 1)
    assert vote.nbytes == before == 700


def test_255_thresholds() -> None:
    assert tally([([255, 0, 128], 1), ([255, 255, 127], 1), ([254, 0, 0], 1)], 255).result().tolist() == [255, 0, 127]


# --- a constant layer
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.0, 0.1])
def test_constant_layer_has_no_pull_and_no_nan(level: float) -> None:
    """All clients' sketches of layer 0 are the same constant: σ̄ = 0, every threshold is that constant, and the pull
    is zero there but not in layer 1."""
    sizes, levels = (3, 4), 7
    sketched = torch.cat([torch.full((2, 3), level), torch.tensor([[0.0, 1, 2, 3], [1, -1, 0, 9]])], dim=1)
    means, variances = statistics(sketched, sizes)
    mean, deviation = pool_statistics((2, 1), means.numpy(), variances.numpy())
    assert deviation[0] == 0
    assert mean[0] == np.float32(level)
    tau = torch.from_numpy(thresholds_of(mean, deviation, normal_quantiles(levels)))
    assert tau[0].tolist() == [to_float32(level)] * levels
    symbols = symbols_of(sketched, tau, sizes)
    assert symbols[:, :3].tolist() == [[levels] * 3] * 2
    vote = Vote(7, levels)
    for own, weight in zip(symbols.numpy(), (2, 1), strict=True):
        vote.add(own, weight)
    assert vote.result()[:3].tolist() == [levels] * 3

    layout = Layout((), (Layer("constant", 0, 8), Layer("other", 8, 8)))
    sketch = Sketch(layout, 0.5, 1, 0)
    consensus = torch.full((8,), levels, dtype=torch.uint8)
    pull = Pull(sketch, tau, torch.from_numpy(deviation), consensus, 1.0, 0.1)
    gradient = pull.gradient(torch.zeros(2, 16))
    assert torch.isfinite(gradient).all()
    assert not gradient[:, :8].any()
    assert gradient[:, 8:].any()


@pytest.mark.parametrize("symbols", [[0, 1], [0, 1, 2, 0], [0, 1, 4]])
def test_a_ballot_that_does_not_fit_is_refused(symbols: list[int]) -> None:
    """The kernel does not check bounds, so the vote must: three coordinates, symbols 0 to 3."""
    vote = Vote(3, thresholds=3)
    with pytest.raises(ValueError, match=r"expected \(3,\) of 0 to 3"):
        vote.add(np.array(symbols, dtype=np.uint8), 1)
    assert vote.total == 0
