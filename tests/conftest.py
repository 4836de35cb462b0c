"""Fixtures of all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from factories import Frames, recorded_messages
from pfedlms.backend import torch_threads


def pytest_configure() -> None:
    """A shell lets background processes ignore Ctrl-C; tests of Ctrl-C and their child processes must not ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, so that sums have one order and small kernels do not wait for each other. The number of threads is
    restored afterwards, because `run.threads` changes it for the whole process."""
    with torch_threads(1):
        yield


@pytest.fixture
def frames(one_thread: None) -> Iterator[Frames]:
    with recorded_messages() as sent:
        yield Frames(sent)
