"""Compiled loops that encode, decode and check messages: symbols as blocks of bits, gaps between positions.

Kernels run on one thread, without the interpreter lock. Integers are uint64: numba makes a float of a uint64 and an
int64, and lets a signed index count from the end. Symbols and bits are read and written 8 bytes at a time. The next
step overwrites surplus bytes, and the end of every segment is processed in a short array with space behind it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pfedlms.backend import compiled

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
SegmentTable = NDArray[np.int64]
u64 = np.uint64

_END = u64(64)  # symbols (8 bytes or more) at the end of a segment that a step before them may touch
_END_BYTES = 512  # enough for the end of a segment: 64 symbols, fewer than eight blocks of 29, and 8 bytes


@compiled()
def _load(data: Bytes, at: u64) -> u64:
    """Bytes [at, at + 8) as one number, the first byte lowest. LLVM makes a single load of the loop."""
    word = u64(0)
    for byte in range(u64(8)):
        word |= u64(data[at + byte]) << (u64(8) * byte)
    return word


@compiled()
def _store(data: Bytes, at: u64, word: u64) -> None:
    """The reverse of `_load`."""
    for byte in range(u64(8)):
        data[at + byte] = (word >> (u64(8) * byte)) & u64(255)


@compiled()
def _pack_bits(symbols: Bytes, out: Bytes, count: u64, bits: u64) -> None:
    """Pack eight symbols, one per byte of a word, into `bits` bytes: first pairs, then fours, then all."""
    gap = u64(8) - bits
    one = u64(0x0001000100010001) * ((u64(1) << bits) - u64(1))
    two = u64(0x0000000100000001) * ((u64(1) << (u64(2) * bits)) - u64(1))
    four = (u64(1) << (u64(4) * bits)) - u64(1)
    for group in range((count + u64(7)) // u64(8)):
        x = _load(symbols, group * u64(8))
        x = (x & one) | ((x >> gap) & (one << bits))
        x = (x & two) | ((x >> (u64(2) * gap)) & (two << (u64(2) * bits)))
        x = (x & four) | ((x >> (u64(4) * gap)) & (four << (u64(4) * bits)))
        _store(out, group * bits, x)


@compiled()
def _unpack_bits(data: Bytes, out: Bytes, count: u64, bits: u64) -> None:
    """The steps of `_pack_bits` in reverse."""
    gap = u64(8) - bits
    one = u64(0x0001000100010001) * ((u64(1) << bits) - u64(1))
    two = u64(0x0000000100000001) * ((u64(1) << (u64(2) * bits)) - u64(1))
    four = (u64(1) << (u64(4) * bits)) - u64(1)
    for group in range((count + u64(7)) // u64(8)):
        x = _load(data, group * bits)
        x = (x & four) | ((x & (four << (u64(4) * bits))) << (u64(4) * gap))
        x = (x & two) | ((x & (two << (u64(2) * bits))) << (u64(2) * gap))
        x = (x & one) | ((x & (one << bits)) << gap)
        _store(out, group * u64(8), x)


@compiled()
def _block_value(symbols: Bytes, start: u64, count: u64, levels: u64) -> u64:
    """Σ q(i) levels^i of `count` symbols, eight per word: pairs in 16 bits, fours in 32, then all in 64."""
    second = levels * levels
    fourth = second * second
    chunks = (count + u64(7)) // u64(8)
    at = start + u64(8) * chunks
    keep = ~u64(0) >> (u64(8) * (u64(8) * chunks - count))  # the highest chunk may be shorter than eight
    value = u64(0)
    for _ in range(chunks):
        at -= u64(8)
        x = _load(symbols, at) & keep
        x = (x & u64(0x00FF00FF00FF00FF)) + levels * ((x >> u64(8)) & u64(0x00FF00FF00FF00FF))
        x = (x & u64(0x0000FFFF0000FFFF)) + second * ((x >> u64(16)) & u64(0x0000FFFF0000FFFF))
        x = (x & u64(0x00000000FFFFFFFF)) + fourth * (x >> u64(32))
        value = value * fourth * fourth + x
        keep = ~u64(0)
    return value


@compiled()
def _pack(symbols: Bytes, out: Bytes, count: u64, powers: Words, width: u64) -> None:
    size, levels = u64(len(powers) - 1), powers[1]
    if size == u64(1):
        _pack_bits(symbols, out, count, width)
        return
    for block in range((count + size - u64(1)) // size):
        at, shift = (block * width) >> u64(3), (block * width) & u64(7)
        value = _block_value(symbols, block * size, size, levels)  # zeros behind the last symbol do not change it
        below = u64(out[at]) & ((u64(1) << shift) - u64(1))  # the end of the block before, in the same byte
        _store(out, at, below | (value << shift))


@compiled()
def _unpack(data: Bytes, out: Bytes, count: u64, powers: Words, width: u64, digits: Words, chunk: u64) -> u64:
    """Decode until a value is not below its limit; returns the number of blocks decoded."""
    size, mask, base = u64(len(powers) - 1), (u64(1) << width) - u64(1), powers[chunk]
    blocks = (count + size - u64(1)) // size
    if size == u64(1):
        _unpack_bits(data, out, count, width)
        return blocks
    for block in range(blocks):
        bit, at = block * width, block * size
        end = min(at + size, count)
        value = (_load(data, bit >> u64(3)) >> (bit & u64(7))) & mask
        if value >= powers[end - at]:  # also what keeps the index into `digits` in range
            return u64(block)
        while at + chunk < end:  # so many digits by each division by base = levels^chunk
            above = value // base
            _store(out, at, digits[value - above * base])
            value = above
            at += chunk
        _store(out, at, digits[value])
    return blocks


@compiled()
def pack_symbols(symbols: Bytes, out: Bytes, powers: Words, width: u64) -> None:
    """Pack symbols in blocks of `size` symbols and `width` bits; `powers` are levels^0 … levels^size. If levels are a
    power of two, the size is 1, because then every block size gives the same stream."""
    size = u64(len(powers) - 1)
    eights = (max(u64(len(symbols)), _END) - _END) // (u64(8) * size)  # blocks packed where they lie: whole bytes
    first, byte = eights * u64(8) * size, eights * width
    _pack(symbols, out, first, powers, width)
    ending, packed = np.zeros(_END_BYTES, np.uint8), np.empty(_END_BYTES, np.uint8)
    count, length = u64(len(symbols)) - first, u64(len(out)) - byte
    ending[:count] = symbols[first:]
    _pack(ending, packed, count, powers, width)
    out[byte:] = packed[:length]


@compiled()
def unpack_symbols(data: Bytes, out: Bytes, powers: Words, width: u64, digits: Words, chunk: u64) -> u64:
    """The reverse of `pack_symbols`; returns the number of symbols before the first block that is not valid."""
    size = u64(len(powers) - 1)
    eights = (max(u64(len(out)), _END) - _END) // (u64(8) * size)
    first, byte = eights * u64(8) * size, eights * width
    good = _unpack(data, out, first, powers, width, digits, chunk)
    if good < eights * u64(8):
        return good * size
    ending, unpacked = np.zeros(_END_BYTES, np.uint8), np.empty(_END_BYTES, np.uint8)
    count, length = u64(len(out)) - first, u64(len(data)) - byte
    ending[:length] = data[byte:]
    good += _unpack(ending, unpacked, count, powers, width, digits, chunk)
    out[first:] = unpacked[:count]
    return good * size


@compiled()
def pack_rows(
    first: int, last: int, rows: Bytes, out: Bytes, stride: int, segments: SegmentTable, powers: Words, width: u64
) -> None:
    """`pack_symbols` of every segment of the rows `first` to `last` − 1 of `rows: [rows, symbols]`. In `out` rows begin
    `stride` bytes apart. `segments` is explained in `codec.Symbols`."""
    for row in range(first, last):
        for begin, end, start, stop, _ in segments:
            segment = out[row * stride + start : row * stride + stop]
            pack_symbols(rows[row, begin:end], segment, powers, width)


@compiled()
def unpack_rows(
    first: int, last: int, data: Bytes, stride: int, out: Bytes, segments: SegmentTable, powers: Words, width: u64,
    digits: Words, chunk: u64, refused: Bytes,
) -> None:  # fmt: skip
    """The reverse of `pack_rows`; sets `refused: [1]` if a segment is not valid."""
    for row in range(first, last):
        for begin, end, start, stop, used in segments:
            segment = data[row * stride + start : row * stride + stop]
            good = unpack_symbols(segment, out[row, begin:end], powers, width, digits, chunk)
            if good < u64(end - begin) or (stop > start and segment[stop - start - 1] >> used):
                refused[0] = 1


@compiled()
def gaps_bits(positions: Words, below: u64, width: u64) -> tuple[u64, u64]:
    """How many positions from the first on ascend and are below `below`, and how many bits `pack_gaps` makes of
    them."""
    bits, following = u64(0), u64(0)
    for index in range(u64(len(positions))):
        if positions[index] < following or positions[index] >= below:
            return u64(index), bits
        bits += ((positions[index] - following) >> width) + u64(1) + width
        following = positions[index] + u64(1)
    return u64(len(positions)), bits


@compiled()
def pack_gaps(positions: Words, out: Bytes, width: u64) -> None:
    """For each position, with a gap of g before it: g >> width ones, a zero, then the lowest `width` bits of g. `out`
    has exactly the bytes this takes."""
    out[:] = 0
    at, following = u64(0), u64(0)
    for index in range(u64(len(positions))):
        gap = positions[index] - following
        following = positions[index] + u64(1)
        for _ in range(gap >> width):
            out[at >> u64(3)] |= u64(1) << (at & u64(7))
            at += u64(1)
        at += u64(1)
        byte, word = at >> u64(3), (gap & ((u64(1) << width) - u64(1))) << (at & u64(7))
        while word:
            out[byte] |= word & u64(255)
            byte += u64(1)
            word >>= u64(8)
        at += width


@compiled()
def unpack_gaps(data: Bytes, out: Words, below: u64, width: u64) -> tuple[u64, u64]:
    """The reverse of `pack_gaps`, until a position is not below `below` or the data end: the number of positions read,
    and their bits."""
    bits, at, following = u64(8) * u64(len(data)), u64(0), u64(0)
    for index in range(u64(len(out))):
        ones, most = u64(0), (below - following) >> width  # more ones are beyond the last place, and may overflow
        while at + ones < bits and ones <= most and data[(at + ones) >> u64(3)] >> ((at + ones) & u64(7)) & u64(1):
            ones += u64(1)
        rest = at + ones + u64(1)
        if ones > most or rest + width > bits:
            return u64(index), at
        word = u64(0)
        for byte in range(rest >> u64(3), (rest + width + u64(7)) >> u64(3)):
            word |= u64(data[byte]) << (u64(8) * (byte - (rest >> u64(3))))
        gap = (ones << width) | ((word >> (rest & u64(7))) & ((u64(1) << width) - u64(1)))
        if gap >= below - following:
            return u64(index), at
        out[index] = following + gap
        following += gap + u64(1)
        at = rest + width
    return u64(len(out)), at


@compiled()
def gaps_end(data: Bytes, count: u64, width: u64) -> u64:
    """Bits of the `count` gaps with which `data` begins; more bits than `data` has if it ends before them."""
    bits, at = u64(8) * u64(len(data)), u64(0)
    for _ in range(count):
        while at < bits and data[at >> u64(3)] >> (at & u64(7)) & u64(1):
            at += u64(1)
        at += width + u64(1)
        if at > bits:
            break
    return at
