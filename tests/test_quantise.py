"""Statistics, thresholds and symbols: by hand, by exact arithmetic and by brute force."""

from __future__ import annotations

import struct
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.quantise import (
    normal_quantiles,
    pack_signs,
    root_mean_squares,
    statistics,
    symbols_of,
    thresholds_of,
)

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def to_float32(value: float) -> float:
    """Round a double to single precision, without NumPy or torch."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_root_mean_squares_by_hand() -> None:
    """In float64: the square of 1e25 is beyond float32, its root is not."""
    sketched = torch.tensor([[3.0, -4.0, 1e25], [0.0, 0.0, -2.0]])
    got = root_mean_squares(sketched, (2, 1))
    assert got.dtype == torch.float32
    assert got.tolist() == [[to_float32(12.5**0.5), to_float32(1e25)], [0.0, 2.0]]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 229])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_signs_are_packed_as_bits(count: int, device: str) -> None:
    """Bit by bit in plain Python; a zero of either sign is +1."""
    values = torch.randn(3, count, generator=torch.Generator().manual_seed(count))
    values[0, 0], values[1, 0] = 0.0, -0.0
    packed = pack_signs(values.to(device))
    assert packed.shape == (3, (count + 7) // 8)
    for row, own in zip(values.tolist(), packed.tolist(), strict=True):
        number = sum((value >= 0) << place for place, value in enumerate(row))
        assert bytes(own) == number.to_bytes(len(own), "little")


def test_statistics_by_hand() -> None:
    sketched = torch.tensor([[1.0, 3.0, 2.0, 2.0, 5.0], [4.0, 4.0, -1.0, 0.0, 1.0]])
    means, variances = statistics(sketched, (2, 3))
    assert means.dtype == variances.dtype == torch.float32
    assert means.tolist() == [[2.0, 3.0], [4.0, 0.0]]
    assert variances.tolist() == [[1.0, 2.0], [0.0, to_float32(2 / 3)]]


def test_statistics_are_computed_in_float64() -> None:
    """8192 and its float32 neighbour 8192 + 2⁻¹⁰: their mean is no float32, their variance is 2⁻²² exactly."""
    means, variances = statistics(torch.tensor([[8192.0, 8192.0 + 2**-10]]), (2,))
    assert variances.item() == 2.0**-22
    assert means.item() == to_float32(8192.0 + 2**-11)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(-100, 100, width=32), st.floats(0, 100, width=32), st.integers(1, 31))
def test_thresholds_are_rounded_once_in_float64_and_once_to_float32(mean: float, deviation: float, levels: int) -> None:
    """τ_t = float32(float64(μ̄ + σ̄ z_t)): the product of two float32 is exact in float64, so one sum is rounded, then
    cut to float32. Here in exact fractions and struct."""
    quantiles = [to_float32(NormalDist().inv_cdf(t / (levels + 1))) for t in range(1, levels + 1)]
    expected = [to_float32(float(Fraction(mean) + Fraction(deviation) * Fraction(z))) for z in quantiles]
    tau = thresholds_of(np.float32([mean]), np.float32([deviation]), normal_quantiles(levels))
    assert tau.dtype == np.float32
    assert tau.tolist() == [expected]


def test_symbols_reach_255() -> None:
    tau = torch.arange(255.0)[None]
    assert symbols_of(torch.tensor([[-1.0, 0.0, 253.5, 254.0, 1e9]]), tau, (5,)).tolist() == [[0, 1, 254, 255, 255]]


def test_values_of_float64_are_compared_as_float32() -> None:
    """0.1 is smaller than its float32, which is the value and the threshold that are sent."""
    tenth = np.float32([[0.1]])
    assert symbols_of(np.float64([0.1]), tenth, (1,)).tolist() == [1]
    assert symbols_of(tenth[0], np.nextafter(tenth.astype(np.float64), 1), (1,)).tolist() == [1]
    assert thresholds_of(np.float64([0.1]), np.float64([0.7]), normal_quantiles(3)).tobytes() == (
        thresholds_of(np.float32([0.1]), np.float32([0.7]), normal_quantiles(3)).tobytes()
    )


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
