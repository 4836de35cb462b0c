"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, so that sums have one order and tiny kernels do not wait for each other; what there was is set again.

    Tests about threads set their own number, and `run.threads` sets it for the process, which here is pytest's.
    """
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])
