"""What all methods share: sums over clients, and objectives of federations that are trained in one stack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedlms.aggregate import weighted_sum

# --- weighted sums


def rounded_sum(samples: list[int], values: np.ndarray, start: np.ndarray) -> np.ndarray:
    """One client after another, every operation rounded to float64."""
    total = start.copy()
    for weight, own in zip(samples, values, strict=True):
        total = total + own.astype(np.float64) * float(weight)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (2,), (4095,), (4096,), (4097,), (9000,)])
def test_a_weighted_sum_has_the_bits_of_a_plain_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Around the size of the parts that stay in the cache, and of numbers whose sum depends on its order."""
    random = torch.Generator().manual_seed(0)
    samples = [3, 1, 1000003, 7]
    spread = 10 ** (6 * torch.rand(4, *shape, generator=random, dtype=torch.float64) - 3)
    values = (torch.randn(4, *shape, generator=random, dtype=torch.float64) * spread).to(dtype)
    start = torch.randn(shape, generator=random, dtype=torch.float64)
    before = start.clone()
    got = weighted_sum(samples, values, start)
    expected = rounded_sum(samples, values.numpy(), start.numpy())
    assert got.dtype == torch.float64
    assert got.shape == start.shape
    assert np.array_equal(got.numpy(), expected)
    assert torch.equal(weighted_sum(samples[1:], values[1:], weighted_sum(samples[:1], values[:1], start)), got)
    assert torch.equal(start, before)


def test_a_number_a_client_is_summed_as_well() -> None:
    got = weighted_sum([2, 3], torch.tensor([0.5, 0.25]), torch.tensor([1.0], dtype=torch.float64))
    assert got.tolist() == [2.75]


def test_rows_of_a_wider_tensor_are_summed() -> None:
    wide = torch.arange(24.0).view(3, 8)
    got = weighted_sum([1, 10, 100], wide[:, 2:5], torch.zeros(3, dtype=torch.float64))
    assert got.tolist() == [2 + 100 + 1800, 3 + 110 + 1900, 4 + 120 + 2000]
