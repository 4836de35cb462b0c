"""Symbols ↔ bits: the payload of every quantised message.

A message is a sequence of symbols q(i) in {0, …, levels-1}; levels = T+1 in the paper. Three rules in exact
integers define its bit stream, so that any language reproduces it:

1.  n symbols take  width(n) = bit_length(levels**n - 1)  bits, the least that tells all combinations apart.
2.  The block size s is the one with width(s) <= 56 that takes the fewest bits per symbol, width(s)/s, and the
    largest such on a tie. (s takes fewer than t when width(s)*t < width(t)*s.)
3.  The symbols are cut into blocks of s; what is left is a last, shorter block. A block of n symbols is the
    integer  q(0) + q(1)*levels + … + q(n-1)*levels**(n-1)  in width(n) bits, lowest bit first. Blocks follow
    one another without gaps. Bit j of the stream is bit j % 8 of byte j // 8. Unused bits of the last byte
    are zero.

With levels = 2**b every block size gives the same stream: symbol i takes the bits [i*b, (i+1)*b), all of them
ceil(count*b/8) bytes. Otherwise, from 4,096 symbols on, the stream is at most 0.6 % (levels <= 16) or 2 %
longer than the ceil(count*log2(levels)) bits of a single integer. Why 56: such a block lies within 8 bytes
wherever it starts, so that it is read and written as one machine word.

Reference: appendix "Communication Protocol" of the paper, "Client-Side (T+1)-ary Encoding" and its remark on
short blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.errors import DecodeError
from pfedlms.kernels import compiled

__all__ = ["Segments", "block_shape", "pack", "pack_segments", "packed_size", "unpack", "unpack_segments"]

Bytes = NDArray[np.uint8]
u64 = np.uint64
Kernel = TypeVar("Kernel", bound=Callable[..., object])

BLOCK_BITS = 56
SLACK = 8  # bytes behind the last one that counts which a kernel may read or write
TABLE_ENTRIES = 1 << 16  # half a megabyte: stays in the second-level cache


def pack(symbols: Bytes | torch.Tensor, levels: int) -> bytes:
    """Write `symbols: uint8 [count]`, each below `levels`, as a stream of `packed_size(count, levels)` bytes.

    A block of n symbols is the integer Σ_i q(i) levels^i in bit_length(levels^n - 1) bits; see the module.

    Args:
        symbols: 1-D uint8 array, or tensor on any device.
        levels: number of values a symbol can take, 2 to 256.

    Returns:
        The bit stream; unused bits of the last byte are zero.

    Raises:
        ValueError: `levels` is out of range, or `symbols` are not uint8 [count] or not below `levels`.

    Example:
        >>> pack(np.array([1, 2, 0, 2], np.uint8), levels=3).hex()  # 1 + 2*3 + 0*9 + 2*27 = 61
        '3d'

    Reference: appendix "Communication Protocol", "Client-Side (T+1)-ary Encoding".
    """
    levels = _checked_levels(levels)
    host = _on_host(symbols, levels)
    size, width = _block_shape(levels)
    length = packed_size(host.size, levels)
    out = np.empty(length + SLACK, np.uint8)
    # Eight blocks are `width` whole bytes. The last blocks are read from a copy that has the slack.
    groups = max(0, host.size - SLACK) // (8 * size)
    head = groups * 8 * size
    _pack_part(host, out, head, levels)
    _pack_part(_with_slack(host[head:]), out[groups * width :], host.size - head, levels)
    return out[:length].tobytes()


def unpack(data: bytes | bytearray | memoryview, count: int, levels: int) -> Bytes:
    """Read back the `count` symbols that `pack` wrote, `uint8 [count]`, and refuse every other byte string.

    Symbol i of a block with the integer Q is  q(i) = floor(Q / levels^i) mod levels.

    Args:
        data: the bit stream, any bytes-like object.
        count: number of symbols.
        levels: number of values a symbol can take, 2 to 256.

    Returns:
        A new array; every symbol is below `levels`.

    Raises:
        ValueError: `count` or `levels` is out of range.
        DecodeError: `data` has another length, a block beyond levels^n - 1, or a bit set after the end.

    Example:
        >>> unpack(bytes.fromhex("3d"), count=4, levels=3)
        array([1, 2, 0, 2], dtype=uint8)

    Reference: appendix "Communication Protocol", "Server-Side Decoding and Aggregation".
    """
    levels, count = _checked_levels(levels), _checked_count(count)
    stream = _read_only(np.frombuffer(data, np.uint8))
    _check_ends(stream, count, levels)
    size, width = _block_shape(levels)
    out = np.empty(count + SLACK, np.uint8)
    groups = max(0, stream.size - SLACK) // width
    head = groups * 8 * size
    good = _unpack_part(stream, out, head, levels)
    if good == head // size:
        good += _unpack_part(_with_slack(stream[groups * width :]), out[head:], count - head, levels)
    if good * size < count:
        raise _bad_block(stream, good, min(size, count - good * size), levels)
    return out[:count]


def pack_segments(symbols: Bytes, segments: Segments) -> bytes:
    """`pack` of every segment of `symbols: uint8 [Σ counts]`, one after another, in one pass.

    Raises:
        ValueError: `symbols` has not the size of all segments, or one of them is not below `levels`.
    """
    if symbols.shape != (segments.symbols,):
        raise ValueError(f"symbols: got shape {list(symbols.shape)}, expected [{segments.symbols}], all segments")
    host, out = _on_host(symbols, segments.levels), np.empty(segments.bytes + SLACK, np.uint8)
    spaced = np.zeros(segments.symbols + SLACK * len(segments.table), np.uint8)
    for index, (start, count) in enumerate(segments.spans):
        spaced[start + SLACK * index : start + SLACK * index + count] = host[start : start + count]
    _pack_segments(spaced, out, segments.table, u64(segments.levels))
    return out[: segments.bytes].tobytes()


def unpack_segments(data: bytes | bytearray | memoryview, segments: Segments) -> Bytes:
    """Read back what `pack_segments` wrote, `uint8 [Σ counts]`, and refuse every other byte string as `unpack` does."""
    stream = np.frombuffer(data, np.uint8)
    out = np.empty(segments.symbols + SLACK, np.uint8)
    chunk, digits = _digit_table(segments.levels)
    levels, base = u64(segments.levels), u64(segments.levels**chunk)
    if stream.size != segments.bytes or not _unpack_segments(
        _with_slack(stream), out, segments.table, levels, digits, u64(chunk), base
    ):
        # Something is wrong: segment by segment, to say what and where.
        parts = [
            unpack(stream[begin:end].data, count, segments.levels) for begin, end, count in segments.places(stream)
        ]
        return np.concatenate(parts)
    return out[: segments.symbols]


class Segments:
    """Lengths of rows of symbols that are packed one after another, each padded to whole bytes; known once, used for
    every message."""

    def __init__(self, counts: Sequence[int], levels: int) -> None:
        self.levels = _checked_levels(levels)
        self.symbols = sum(_checked_count(count) for count in counts)
        size, width = _block_shape(self.levels)
        rows, at, byte = [], 0, 0
        for count in counts:
            bits, rest = _stream_bits(count, self.levels), count % size
            length, limits = (bits + 7) // 8, (self.levels**size, self.levels**rest)
            rows.append((at, count, byte, length, bits % 8, size, width, _width(rest, self.levels), *limits))
            at, byte = at + count, byte + length
        self.bytes = byte
        self.spans = [(row[0], row[1]) for row in rows]
        # A row a segment: first symbol, symbols, first byte, bytes, bits used of the last byte (0: all), then what the
        # kernels for blocks take: block size and width, width of the last block, limits of full and last blocks.
        self.table = np.array(rows, dtype=np.uint64).reshape(len(rows), 10)

    def places(self, stream: Bytes) -> Iterator[tuple[int, int, int]]:
        """Where each segment begins and ends in `stream`, and its number of symbols; the last one takes what is left,
        so that a stream of another length is found out."""
        for index, (_, count, begin, length, *_) in enumerate(self.table.tolist()):
            yield begin, stream.size if index == len(self.table) - 1 else begin + length, count


def packed_size(count: int, levels: int) -> int:
    """Bytes of `count` packed symbols: ceil(stream bits / 8), which is ceil(count * b / 8) for levels = 2^b.

    Args:
        count: number of symbols, 0 or more.
        levels: number of values a symbol can take, 2 to 256.

    Returns:
        The length of what `pack` returns.

    Example:
        >>> packed_size(1000, levels=8), packed_size(1000, levels=3)
        (375, 199)

    Reference: appendix "Communication Protocol", "Communication Complexity".
    """
    return (_stream_bits(_checked_count(count), _checked_levels(levels)) + 7) // 8


def block_shape(levels: int) -> tuple[int, int]:
    """Symbols s and bits width(s) of a full block: width(s)/s least with width(s) <= 56, largest s on a tie.

    Args:
        levels: number of values a symbol can take, 2 to 256.

    Returns:
        The pair (symbols, bits).

    Example:
        >>> block_shape(3), block_shape(10)  # 1.586 and 3.333 bits; log2 is 1.585 and 3.322
        ((29, 46), (15, 50))

    Reference: appendix "Communication Protocol", remark on short blocks.
    """
    return _block_shape(_checked_levels(levels))


@lru_cache(maxsize=256)
def _block_shape(levels: int) -> tuple[int, int]:
    best, bits = 1, _width(1, levels)
    size = 2
    while (width := _width(size, levels)) <= BLOCK_BITS:
        if width * best <= bits * size:
            best, bits = size, width
        size += 1
    return best, bits


def _width(count: int, levels: int) -> int:
    most: int = levels**count - 1
    return most.bit_length()


def _stream_bits(count: int, levels: int) -> int:
    size, width = _block_shape(levels)
    blocks, rest = divmod(count, size)
    return blocks * width + _width(rest, levels)


def _checked_levels(levels: int) -> int:
    if not isinstance(levels, int | np.integer) or not 2 <= levels <= 256:
        raise ValueError(f"levels: got {levels!r}, expected a whole number from 2 to 256")
    return int(levels)


def _checked_count(count: int) -> int:
    if not isinstance(count, int | np.integer) or count < 0:
        raise ValueError(f"count: got {count!r}, expected a whole number of symbols, 0 or more")
    return int(count)


def _on_host(symbols: Bytes | torch.Tensor, levels: int) -> Bytes:
    """The symbols as a contiguous read-only array in host memory, once they are known to be valid."""
    given = symbols if isinstance(symbols, torch.Tensor) else np.asarray(symbols)
    if given.dtype not in (torch.uint8, np.uint8) or given.ndim != 1:
        shape = list(given.shape)
        raise ValueError(f"symbols: got {given.dtype} of shape {shape}, expected uint8 of shape [count]")
    host = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    if host.size and int(host.max()) >= levels:
        at = int(np.argmax(host >= levels))
        raise ValueError(f"symbols[{at}]: got {host[at]}, expected a value below {levels}, the number of levels")
    return _read_only(np.ascontiguousarray(host))


def _check_ends(stream: Bytes, count: int, levels: int) -> None:
    """Refuse a stream that has not the length of `count` symbols or goes on behind them."""
    bits = _stream_bits(count, levels)
    expected, used = (bits + 7) // 8, bits % 8
    if stream.size != expected:
        raise DecodeError(
            f"packed symbols: got {stream.size} bytes, expected {expected} ({count} symbols, {levels} levels)"
        )
    if used and int(stream[-1]) >> used:
        raise DecodeError(
            f"packed symbols: got last byte 0x{stream[-1]:02x}, expected only its lowest {used} bits in use"
        )


def _bad_block(stream: Bytes, index: int, count: int, levels: int) -> DecodeError:
    first, width = index * _block_shape(levels)[1], _width(count, levels)
    covering = stream[first // 8 : (first + width + 7) // 8].tobytes()
    value = (int.from_bytes(covering, "little") >> first % 8) % 2**width
    return DecodeError(
        f"packed symbols, block {index}: got {value}, expected below {levels}**{count} = {levels**count}"
    )


def _read_only(array: Bytes) -> Bytes:
    # Numba compiles a kernel for writable and again for read-only inputs; this way only once.
    view = array.view()
    view.flags.writeable = False
    return view


def _with_slack(array: Bytes) -> Bytes:
    return _read_only(np.concatenate([array, np.zeros(SLACK, np.uint8)]))


def _pack_part(source: Bytes, target: Bytes, count: int, levels: int) -> None:
    """Encode the first `count` symbols of `source` from the start of `target` on."""
    if levels & (levels - 1) == 0:
        _pack_bits(source, target, u64(count), u64(levels.bit_length() - 1))
        return
    size, width = _block_shape(levels)
    numbers = (count, levels, size, width, _width(count % size, levels))
    _pack_blocks(source, target, *map(u64, numbers))


def _unpack_part(source: Bytes, target: Bytes, count: int, levels: int) -> int:
    """Decode the first `count` symbols of `source`; returns the number of blocks before the first bad one."""
    size, width = _block_shape(levels)
    if levels & (levels - 1) == 0:
        _unpack_bits(source, target, u64(count), u64(levels.bit_length() - 1))
        return -(-count // size)
    chunk, table = _digit_table(levels)
    rest = count % size
    numbers = (count, size, width, levels**size, _width(rest, levels), levels**rest, chunk, levels**chunk)
    return int(_unpack_blocks(source, target, table, *map(u64, numbers)))


@lru_cache(maxsize=8)
def _digit_table(levels: int) -> tuple[int, NDArray[np.uint64]]:
    """(c, table): entry v of levels^c holds the c digits of v in base `levels`, one per byte, lowest first.

    c is such that the table stays in the cache and splits a block into parts of about the same length.
    """
    size, _ = _block_shape(levels)
    most = max(c for c in range(1, 9) if c == 1 or levels**c <= TABLE_ENTRIES)
    parts = -(-size // most)
    chunk = -(-size // parts)
    values = np.arange(levels**chunk, dtype=np.uint64)
    table = np.zeros_like(values)
    for digit in range(chunk):
        table |= (values // u64(levels**digit) % u64(levels)) << u64(8 * digit)
    return chunk, table


# Kernels: one thread each, without the interpreter lock. All integers are uint64, because numba turns uint64
# with int64 into a float and lets a signed index count from the end. Reads and writes are of 8 bytes, however
# many of them count: arrays go on for SLACK bytes, and what one step writes too much the next writes again.


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
def _append(out: Bytes, bit: u64, value: u64) -> None:
    """Write `value` from bit position `bit` on, keeping the bits below it in the same byte."""
    at, shift = bit >> u64(3), bit & u64(7)
    below = u64(out[at]) & ((u64(1) << shift) - u64(1))
    _store(out, at, below | (value << shift))


@compiled()
def _pack_blocks(symbols: Bytes, out: Bytes, count: u64, levels: u64, size: u64, width: u64, rest_width: u64) -> None:
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
def _unpack_blocks(
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
def _pack_segments(symbols: Bytes, out: Bytes, table: NDArray[np.uint64], levels: u64) -> None:
    """Pack all segments; in `symbols` each is followed by SLACK zeros."""
    bits, power = u64(0), levels & (levels - u64(1)) == u64(0)
    while (u64(1) << bits) < levels:
        bits += u64(1)
    for row in range(u64(len(table))):
        start, count, byte = table[row, 0] + u64(SLACK) * row, table[row, 1], table[row, 2]
        if power:
            _pack_bits(symbols[start:], out[byte:], count, bits)
        else:
            _pack_blocks(symbols[start:], out[byte:], count, levels, table[row, 5], table[row, 6], table[row, 7])


@compiled()
def _unpack_segments(
    data: Bytes, out: Bytes, table: NDArray[np.uint64], levels: u64, digits: NDArray[np.uint64], chunk: u64, base: u64
) -> bool:
    """Unpack all segments; whether every one of them is what `_pack_segments` can have written."""
    bits, power = u64(0), levels & (levels - u64(1)) == u64(0)
    while (u64(1) << bits) < levels:
        bits += u64(1)
    for row in range(u64(len(table))):
        start, count, byte, length, used = table[row, 0], table[row, 1], table[row, 2], table[row, 3], table[row, 4]
        part = data[byte:]
        if used and u64(part[length - u64(1)]) >> used:
            return False
        if power:
            _unpack_bits(part, out[start:], count, bits)
            continue
        size = table[row, 5]
        numbers = (table[row, 6], table[row, 8], table[row, 7], table[row, 9])
        good = _unpack_blocks(part, out[start:], digits, count, size, *numbers, chunk, base)
        if good * size < count:
            return False
    return True
