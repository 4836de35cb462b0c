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

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.errors import DecodeError
from pfedlms.wire.kernels import (
    SLACK,
    Bytes,
    pack_all,
    pack_bits,
    pack_blocks,
    u64,
    unpack_all,
    unpack_bits,
    unpack_blocks,
)

__all__ = ["Segments", "block_shape", "pack", "pack_segments", "packed_size", "unpack", "unpack_segments"]


BLOCK_BITS = 56
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
    pack_all(_read_only(spaced), out, segments.table, u64(segments.levels))
    return out[: segments.bytes].tobytes()


def unpack_segments(data: bytes | bytearray | memoryview, segments: Segments) -> Bytes:
    """Read back what `pack_segments` wrote, `uint8 [Σ counts]`, and refuse every other byte string as `unpack` does."""
    stream = np.frombuffer(data, np.uint8)
    out = np.empty(segments.symbols + SLACK, np.uint8)
    chunk, digits = _digit_table(segments.levels)
    levels, base = u64(segments.levels), u64(segments.levels**chunk)
    if stream.size != segments.bytes or not unpack_all(
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
        pack_bits(source, target, u64(count), u64(levels.bit_length() - 1))
        return
    size, width = _block_shape(levels)
    numbers = (count, levels, size, width, _width(count % size, levels))
    pack_blocks(source, target, *map(u64, numbers))


def _unpack_part(source: Bytes, target: Bytes, count: int, levels: int) -> int:
    """Decode the first `count` symbols of `source`; returns the number of blocks before the first bad one."""
    size, width = _block_shape(levels)
    if levels & (levels - 1) == 0:
        unpack_bits(source, target, u64(count), u64(levels.bit_length() - 1))
        return -(-count // size)
    chunk, table = _digit_table(levels)
    rest = count % size
    numbers = (count, size, width, levels**size, _width(rest, levels), levels**rest, chunk, levels**chunk)
    return int(unpack_blocks(source, target, table, *map(u64, numbers)))


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
