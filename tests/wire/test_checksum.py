"""The checksum by carry-less multiplication, and without it, against zlib."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
import torch

from pfedlms.wire import checksum
from pfedlms.wire.checksum import SHORTEST, crc32, crc32_rows

DATA = random.Random(4).randbytes(100_000)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("start", [0, 1, 0x12345678, 0xFFFFFFFF])
def test_the_checksum_equals_that_of_zlib(kernel: bool, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "HAS_KERNEL", kernel and checksum.HAS_KERNEL)
    for length in (0, 1, 63, *range(SHORTEST - 1, SHORTEST + 130), 65_537, 100_000):
        for begin in (0, 1):
            piece = memoryview(DATA)[begin:][:length]
            assert crc32(piece, start) == zlib.crc32(piece, start), length
    assert crc32(memoryview(b"123456789")) == 0xCBF43926  # the published check value


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [0, 100, SHORTEST + 77])
def test_checksums_of_rows_equal_those_of_zlib(threads: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedlms.backend._WORTH_WAKING", 64)
    torch.set_num_threads(threads)
    rows = np.frombuffer(DATA, np.uint8)[: 7 * (size + 40)].reshape(7, -1)[:, 40:]
    starts = [zlib.crc32(bytes([row])) for row in range(7)]
    assert crc32_rows(rows, starts) == [zlib.crc32(bytes([row]) + rows[row].tobytes()) for row in range(7)]
