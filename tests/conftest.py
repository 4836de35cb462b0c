"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from factories import Frames, overheard
from pfedlms.backend import torch_threads


def pytest_configure() -> None:
    """A shell has what it starts in the background ignore Ctrl-C; tests of Ctrl-C, and what they start, must not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, so that sums have one order and tiny kernels do not wait for each other; what there was is set again.

    Tests about threads set their own number, and `run.threads` sets it for the process, which here is pytest's.
    """
    with torch_threads(1):
        yield


@pytest.fixture
def frames(one_thread: None) -> Iterator[Frames]:
    with overheard() as sent:
        yield Frames(sent)
