"""The loops of the codec, compiled: symbols into blocks of bits and back.

One thread each, without the interpreter lock. All integers are uint64, because numba turns uint64 with int64 into a
float and lets a signed index count from the end. Reads and writes are of 8 bytes, however many of them count: arrays
go on for SLACK bytes, and what one step writes too much the next writes again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pfedlms.backend import compiled

Bytes = NDArray[np.uint8]
u64 = np.uint64
SLACK = 8  # bytes behind the last one that counts which a kernel may read or write


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
def pack_bits(symbols: Bytes, out: Bytes, count: u64, bits: u64) -> None:
    """Draw eight symbols, one per byte of a word, together to `bits` bytes: pairs, then fours, then all."""
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
def unpack_bits(data: Bytes, out: Bytes, count: u64, bits: u64) -> None:
    """The steps of `pack_bits` in reverse."""
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
def _append(out: Bytes, bit: u64, value: u64) -> None:
    """Write `value` from bit position `bit` on, keeping the bits below it in the same byte."""
    at, shift = bit >> u64(3), bit & u64(7)
    below = u64(out[at]) & ((u64(1) << shift) - u64(1))
    _store(out, at, below | (value << shift))


@compiled()
def pack_blocks(symbols: Bytes, out: Bytes, count: u64, levels: u64, size: u64, width: u64, rest_width: u64) -> None:
    blocks = count // size
    for block in range(blocks):
        _append(out, block * width, _block_value(symbols, block * size, size, levels))
    if rest_width:
        _append(out, blocks * width, _block_value(symbols, blocks * size, count - blocks * size, levels))


@compiled()
def _write_digits(
    out: Bytes, start: u64, count: u64, value: u64, table: NDArray[np.uint64], chunk: u64, base: u64
) -> None:
    """The `count` digits of `value`, `chunk` of them by each division by base = levels^chunk."""
    at, end = start, start + count
    while at + chunk < end:
        above = value // base
        _store(out, at, table[value - above * base])
        value = above
        at += chunk
    _store(out, at, table[value])


@compiled()
def unpack_blocks(
    data: Bytes,
    out: Bytes,
    table: NDArray[np.uint64],
    count: u64,
    size: u64,
    width: u64,
    limit: u64,
    rest_width: u64,
    rest_limit: u64,
    chunk: u64,
    base: u64,
) -> u64:
    """Decode until a value is not below its limit; returns the number of blocks decoded."""
    blocks = count // size
    for block in range(blocks):
        bit = block * width
        value = (_load(data, bit >> u64(3)) >> (bit & u64(7))) & ((u64(1) << width) - u64(1))
        if value >= limit:  # also what keeps the table index in range
            return u64(block)
        _write_digits(out, block * size, size, value, table, chunk, base)
    if rest_width:
        bit = blocks * width
        value = (_load(data, bit >> u64(3)) >> (bit & u64(7))) & ((u64(1) << rest_width) - u64(1))
        if value >= rest_limit:
            return blocks
        _write_digits(out, blocks * size, count - blocks * size, value, table, chunk, base)
        blocks += u64(1)
    return blocks


@compiled()
def pack_all(symbols: Bytes, out: Bytes, table: NDArray[np.uint64], levels: u64) -> None:
    """Pack all segments; in `symbols` each is followed by SLACK zeros."""
    bits, power = u64(0), levels & (levels - u64(1)) == u64(0)
    while (u64(1) << bits) < levels:
        bits += u64(1)
    for row in range(u64(len(table))):
        start, count, byte = table[row, 0] + u64(SLACK) * row, table[row, 1], table[row, 2]
        if power:
            pack_bits(symbols[start:], out[byte:], count, bits)
        else:
            pack_blocks(symbols[start:], out[byte:], count, levels, table[row, 5], table[row, 6], table[row, 7])


@compiled()
def unpack_all(
    data: Bytes, out: Bytes, table: NDArray[np.uint64], levels: u64, digits: NDArray[np.uint64], chunk: u64, base: u64
) -> bool:
    """Unpack all segments; whether every one of them is what `pack_all` can have written."""
    bits, power = u64(0), levels & (levels - u64(1)) == u64(0)
    while (u64(1) << bits) < levels:
        bits += u64(1)
    for row in range(u64(len(table))):
        start, count, byte, length, used = table[row, 0], table[row, 1], table[row, 2], table[row, 3], table[row, 4]
        part = data[byte:]
        if used and u64(part[length - u64(1)]) >> used:
            return False
        if power:
            unpack_bits(part, out[start:], count, bits)
            continue
        size = table[row, 5]
        numbers = (table[row, 6], table[row, 8], table[row, 7], table[row, 9])
        good = unpack_blocks(part, out[start:], digits, count, size, *numbers, chunk, base)
        if good * size < count:
            return False
    return True
