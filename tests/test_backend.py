"""Threads: how work is spread over them, and that results do not depend on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pfedlms
from pfedlms import backend


@pytest.fixture
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("three_threads")
def test_spread_does_everything_once_on_its_own_threads_and_puts_theirs_back() -> None:
    seen: list[tuple[int, bool, str]] = []
    lock = threading.Lock()

    def work(item: int) -> None:
        with lock:
            seen.append((item, backend.shares_work(), threading.current_thread().name))

    backend.spread(work, list(range(10)))
    assert sorted(item for item, _, _ in seen) == list(range(10))
    assert not any(shares for _, shares, _ in seen)
    assert threading.current_thread().name not in {name for _, _, name in seen}
    assert backend.shares_work()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def work(item: int) -> None:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        backend.spread(work, [1, 2, 3])
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "fedproto", "pfed1bs"])
def test_results_do_not_depend_on_the_number_of_threads(method: str) -> None:
    """Every client's steps are taken by one thread, however many there are (up to four)."""

    def measured() -> tuple[Any, torch.Tensor]:
        result = pfedlms.run("digits", method=method, rounds=3, clients=7, hidden=2048, momentum=0.5, seed=1)
        for record in result.metrics:
            del record["seconds"]
        return result.metrics, result.federation.state()["params"]

    metrics, params = measured()
    try:
        torch.set_num_threads(3)
        assert torch.equal(measured()[1], params)
        assert measured()[0] == metrics
    finally:
        torch.set_num_threads(1)
