"""The CRC-32 of zlib, of long buffers in pieces by several threads.

A CRC is the remainder of a polynomial over GF(2), the bits of the message being its coefficients, by P(x) of degree 32.
Putting B behind A multiplies A by x^(8|B|), so that

    crc(A B) = crc(A) · x^(8|B|) + crc(B)    mod P

where + is xor; what zlib adds at the start and the end of each cancels out. So pieces are summed up by themselves and
put together afterwards. Numbers are reflected as the CRC is: the highest of 32 bits belongs to x^0, the lowest to x^31.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pfedlms.backend import share, threads

PIECE = 1 << 20  # bytes, at least: below, handing work over takes longer than doing it
_POLYNOMIAL = 0xEDB88320  # P without x^32
_ONE, _X = 1 << 31, 1 << 30


def crc32(data: memoryview, start: int = 0) -> int:
    """`zlib.crc32(data, start)`; `start` is the checksum of what stands before."""
    if len(data) < 2 * PIECE:
        return zlib.crc32(data, start)
    sums: dict[int, tuple[int, int]] = {}

    def sum_up(first: int, last: int) -> None:
        piece = data[first * PIECE : last * PIECE]
        sums[first] = len(piece), zlib.crc32(piece)

    share(sum_up, -(-len(data) // PIECE), PIECE)
    for _, (length, crc) in sorted(sums.items()):
        start = _times(start, _power(8 * length)) ^ crc
    return start


def crc32_rows(rows: NDArray[np.uint8], starts: Sequence[int]) -> list[int]:
    """`crc32` of every row, which threads take in turn; those of fewer rows than threads share each."""
    if len(rows) < threads():
        return [crc32(row.data, start) for row, start in zip(rows, starts, strict=True)]
    found = [0] * len(rows)

    def sum_up(first: int, last: int) -> None:
        for row in range(first, last):
            found[row] = zlib.crc32(rows[row], starts[row])

    share(sum_up, len(rows), rows.shape[1])
    return found


def _times(a: int, b: int) -> int:
    """a(x) · b(x) mod P."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    """x^exponent mod P, by squaring."""
    if exponent == 0:
        return _ONE
    square = _times(_power(exponent // 2), _power(exponent // 2))
    return _times(square, _X) if exponent % 2 else square
