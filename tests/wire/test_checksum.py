"""The checksum in pieces against zlib, and when there are pieces and threads at all."""

from __future__ import annotations

import multiprocessing
import random
import threading
import zlib

import numpy as np
import pytest
import torch

from pfedlms.wire import checksum
from pfedlms.wire.checksum import crc32

DATA = random.Random(4).randbytes(100_000)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PIECE", 64)
    monkeypatch.setattr("pfedlms.backend._WORTH_WAKING", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("start", [0, 1, 0x12345678, 0xFFFFFFFF])
def test_it_is_that_of_zlib(threads: int, start: int) -> None:
    torch.set_num_threads(threads)
    for length in (0, 1, 63, 64, 127, 128, 129, 191, 192, 193, 511, 512, 1000, 1025, 65_537, 100_000):
        assert crc32(memoryview(DATA)[:length], start) == zlib.crc32(DATA[:length], start), length


def test_a_long_message_with_the_real_pieces() -> None:
    torch.set_num_threads(4)
    data = np.random.default_rng(1).integers(0, 256, 5 * checksum.PIECE + 12_345).astype(np.uint8)
    assert crc32(memoryview(data), crc32(memoryview(b"123"))) == zlib.crc32(b"123" + data.tobytes())
    assert crc32(memoryview(b"123456789")) == 0xCBF43926  # the published check value


def test_no_thread_is_asked_for_short_messages_or_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    usual = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *given: seen.append(threading.get_ident()) or usual(*given))
    torch.set_num_threads(8)
    crc32(memoryview(bytes(2 * checksum.PIECE - 1)))
    torch.set_num_threads(1)
    crc32(memoryview(bytes(8 * checksum.PIECE)))
    assert seen == 2 * [threading.get_ident()]
    meet = threading.Barrier(2, timeout=30)  # two threads are there, or nobody passes
    monkeypatch.setattr(zlib, "crc32", lambda piece: meet.wait() * 0 + usual(piece))
    torch.set_num_threads(2)
    data = random.Random(5).randbytes(8 * checksum.PIECE)
    assert crc32(memoryview(data)) == usual(data)


@pytest.mark.usefixtures("small_pieces")
def test_an_error_in_a_piece_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "crc32", lambda piece: 1 // piece[0])
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        crc32(memoryview(bytes(1000)))


def checked_in_child(expected: int) -> None:
    torch.set_num_threads(2)
    assert crc32(memoryview(DATA * 40)) == expected


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    torch.set_num_threads(2)
    expected = zlib.crc32(DATA * 40)
    assert crc32(memoryview(DATA * 40)) == expected  # the parent's threads are there
    child = multiprocessing.get_context("fork").Process(target=checked_in_child, args=(expected,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
