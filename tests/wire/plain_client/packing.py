"""Section 6 of the page: packed symbols."""

from __future__ import annotations

from collections.abc import Sequence


class Refused(Exception):
    """A frame was refused; `error` is the name in the table of section 8."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


def width(count: int, levels: int) -> int:
    return (levels**count - 1).bit_length()


def block_size(levels: int) -> int:
    best = 1
    for s in range(2, 57):
        if width(s, levels) <= 56 and width(s, levels) * best <= width(best, levels) * s:
            best = s
    return best


def packed_size(count: int, levels: int) -> int:
    s = block_size(levels)
    return ((count // s) * width(s, levels) + width(count % s, levels) + 7) // 8


def pack(symbols: Sequence[int], levels: int) -> bytes:
    s, bits, at = block_size(levels), 0, 0
    for start in range(0, len(symbols), s):
        block = symbols[start : start + s]
        bits |= sum(q * levels**i for i, q in enumerate(block)) << at
        at += width(len(block), levels)
    return bits.to_bytes((at + 7) // 8, "little")


def unpack(data: bytes, count: int, levels: int) -> list[int]:
    if len(data) != packed_size(count, levels):
        raise Refused("decode")
    s, bits, symbols = block_size(levels), int.from_bytes(data, "little"), []
    while len(symbols) < count:
        n = min(s, count - len(symbols))
        value, bits = bits % (1 << width(n, levels)), bits >> width(n, levels)
        if value >= levels**n:
            raise Refused("decode")
        for _ in range(n):
            symbols.append(value % levels)
            value //= levels
    if bits:
        raise Refused("decode")
    return symbols
