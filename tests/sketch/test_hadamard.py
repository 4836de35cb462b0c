"""The Walsh–Hadamard transform: its definition, and a kernel with the same bits as the reference."""

from __future__ import annotations

import pytest
import torch

from definitions import hadamard
from factories import normal
from pfedlms import backend
from pfedlms.backend import torch_threads
from pfedlms.sketch.hadamard import fwht_, fwht_reference

# Blocks change at 2^6, 2^12 and 2^18; threads share a row beyond 2^18.
EXPONENTS = [*range(17), 20]


def test_stages_run_from_stride_one_upwards() -> None:
    # 2^24 + 1 rounds to 2^24 in float32. So (a + b) + (c + d) = 2^24 + (1 - 2^24) = 1, while strides 2, 1
    # would give (a + c) + (b + d) = 0 + 2 = 2.
    big = 2.0**24
    values = torch.tensor([big, 1.0, -big, 1.0])
    assert fwht_reference(values)[0].item() == 1.0
    assert fwht_(values.clone())[0].item() == 1.0


@pytest.mark.parametrize("exponent", range(9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_transform_of_the_identity_is_the_hadamard_matrix(exponent: int, dtype: torch.dtype) -> None:
    size = 2**exponent
    expected = torch.from_numpy(hadamard(size)).to(dtype)
    assert torch.equal(fwht_(torch.eye(size, dtype=dtype)), expected)
    assert torch.equal(fwht_reference(torch.eye(size, dtype=dtype)), expected)


@pytest.mark.parametrize("exponent", [2, 6, 9, 14])
def test_the_transform_twice_is_n_times_the_identity(exponent: int) -> None:
    """On small whole numbers, whose sums are exact."""
    size = 2**exponent
    values = (9 * normal(3, size)).round().double()
    assert torch.equal(fwht_(fwht_(values.clone())), size * values)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_kernel_has_the_bits_of_the_reference(exponent: int, offset: int) -> None:
    """Rows may begin anywhere in memory."""
    values = normal(2 * 2**exponent + offset)[offset:].view(2, -1)
    expected = fwht_reference(values)
    assert torch.equal(fwht_(values), expected)


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 128), (2, 1, 3, 16), (0, 64), (1, 1)])
def test_all_rows_are_transformed_in_place(shape: tuple[int, ...]) -> None:
    values = normal(*shape)
    rows = values.clone().reshape(-1, shape[-1])
    result = fwht_(values)
    assert result is values
    assert result.shape == shape
    for row, got in zip(rows, result.view(-1, shape[-1]), strict=True):
        assert torch.equal(got, fwht_reference(row))


def test_the_reference_does_not_change_its_argument() -> None:
    for size in (1, 8):
        values = normal(2, size)
        before = values.clone()
        fwht_reference(values)[:] = 0.0
        assert torch.equal(values, before)


@pytest.mark.parametrize("size", [16, 2**13, 2**19])
def test_threads_and_rows_do_not_change_the_result(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_WORTH_WAKING", 1)
    values = normal(3, size)
    expected = fwht_reference(values)
    for threads in (1, 2, 5):
        with torch_threads(threads):
            for rows in (1, 2, 3):
                assert torch.equal(fwht_(values[:rows].clone()), expected[:rows])


@pytest.mark.parametrize("shape", [(3,), (4, 12), (0,), (2, 0), (), (2**25,)])
def test_sizes_that_are_no_powers_of_two_are_refused(shape: tuple[int, ...]) -> None:
    for function in (fwht_, fwht_reference):
        with pytest.raises(ValueError, match=r"values has shape .*expected .*power of two from 1 to 16777216; pad"):
            function(torch.zeros(()).expand(shape))


def test_other_devices_use_the_reference() -> None:
    values = torch.zeros(2, 8, device="meta")
    assert fwht_(values) is values
