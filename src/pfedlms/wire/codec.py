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

Reference: appendix "Communication Protocol" of the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.errors import DecodeError
from pfedlms.wire.kernels import Bytes, pack_signs, pack_symbols, u64, unpack_signs, unpack_symbols

Buffer = bytes | bytearray | memoryview

BLOCK_BITS = 56
TABLE_ENTRIES = 1 << 16  # half a megabyte: stays in the second-level cache


def pack(symbols: Bytes | torch.Tensor, levels: int) -> bytes:
    """Write `symbols: uint8 [count]`, each below `levels` (2 to 256), as `packed_size(count, levels)` bytes.

    >>> pack(np.array([1, 2, 0, 2], np.uint8), levels=3).hex()  # 1 + 2*3 + 0*9 + 2*27 = 61
    '3d'
    """
    given = symbols if isinstance(symbols, torch.Tensor) else np.asarray(symbols)
    if given.dtype not in (torch.uint8, np.uint8) or given.ndim != 1:
        shape = list(given.shape)
        raise ValueError(f"symbols: got {given.dtype} of shape {shape}, expected uint8 of shape [count]")
    host = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    segments = Segments((host.size,), levels)
    out = np.empty(segments.bytes, np.uint8)
    segments.pack(host, out.data)
    return out.tobytes()


def unpack(data: Buffer, count: int, levels: int) -> Bytes:
    """Read back the `count` symbols that `pack` wrote, a new `uint8 [count]`, and refuse every other byte string: one
    of another length, with a block beyond levels^n - 1, or with a bit set after the end (DecodeError)."""
    segments = Segments((count,), levels)
    out = np.empty(segments.symbols, np.uint8)
    segments.unpack(data, out)
    return out


def packed_size(count: int, levels: int) -> int:
    """Bytes of `count` packed symbols: ceil(stream bits / 8), which is ceil(count * b / 8) for levels = 2^b."""
    return Segments((count,), levels).bytes


class Segments:
    """Rows of symbols, `counts` of them below `levels`, that are packed one after another, each padded to whole bytes.

    Known once, used for every message.
    """

    def __init__(self, counts: Sequence[int], levels: int) -> None:
        size, width = block_shape(levels)
        self.levels, self.symbols, self.bytes = int(levels), 0, 0
        self._rows: list[tuple[slice, slice, int]] = []  # symbols, bytes, and how many bits of the last byte are used
        for count in counts:
            if not isinstance(count, int | np.integer) or count < 0:
                raise ValueError(f"count: got {count!r}, expected a whole number of symbols, 0 or more")
            blocks, rest = divmod(int(count), size)
            bits = blocks * width + _width(rest, self.levels)
            last, end = self.symbols + int(count), self.bytes + (bits + 7) // 8
            self._rows.append((slice(self.symbols, last), slice(self.bytes, end), bits % 8 or 8))
            self.symbols, self.bytes = last, end

    def pack(self, values: NDArray[Any], out: Buffer) -> None:
        """Write `values: [Σ counts]` as the `bytes` bytes of `out`.

        Symbols are uint8 below `levels`. Those of two levels may also be bool, or float32, where 1 stands for what is
        at least zero.
        """
        stream = np.frombuffer(out, np.uint8)
        self._check_sizes(values, stream)
        values = np.ascontiguousarray(values).view()
        values.flags.writeable = False  # numba compiles a kernel for read-only inputs and again for others
        if values.dtype == np.float32:
            for symbols, place, _ in self._rows:
                pack_signs(values[symbols], stream[place])
            return
        values = values.view(np.uint8)
        if values.size and int(values.max()) >= self.levels:
            at = int(np.argmax(values >= self.levels))
            raise ValueError(
                f"symbols[{at}]: got {values[at]}, expected a value below {self.levels}, the number of levels"
            )
        powers, width, _, _ = _blocks(self.levels)
        for symbols, place, _ in self._rows:
            pack_symbols(values[symbols], stream[place], powers, width)

    def unpack(self, data: Buffer, out: NDArray[Any]) -> None:
        """Read back into `out: [Σ counts]` what `pack` wrote, float32 as +1 and -1; refuse every other byte string."""
        stream = np.frombuffer(memoryview(data).toreadonly(), np.uint8)
        if stream.size != self.bytes:
            raise DecodeError(
                f"packed symbols: got {stream.size} bytes, expected {self.bytes} "
                f"({self.symbols} symbols, {self.levels} levels)"
            )
        self._check_sizes(out, stream)
        for symbols, place, used in self._rows:
            packed, unpacked = stream[place], out[symbols]
            if packed.size and packed[-1] >> used:
                raise DecodeError(
                    f"packed symbols: got last byte 0x{packed[-1]:02x}, expected only its lowest {used} bits in use"
                )
            if out.dtype == np.float32:
                unpack_signs(packed, unpacked)
                continue
            good = int(unpack_symbols(packed, unpacked.view(np.uint8), *_blocks(self.levels)))
            if good < unpacked.size:
                size, width = block_shape(self.levels)
                block, count = good // size, min(size, unpacked.size - good)
                covering = packed[block * width // 8 :][:8].tobytes()
                value = (int.from_bytes(covering, "little") >> block * width % 8) % 2 ** _width(count, self.levels)
                raise DecodeError(
                    f"packed symbols, block {block}: got {value}, "
                    f"expected below {self.levels}**{count} = {self.levels**count}"
                )

    def _check_sizes(self, values: NDArray[Any], stream: Bytes) -> None:
        """The kernels rely on them."""
        if values.shape != (self.symbols,) or stream.size != self.bytes:
            raise ValueError(
                f"symbols: got shape {list(values.shape)} for {stream.size} bytes, "
                f"expected [{self.symbols}], all segments, for {self.bytes}"
            )


@lru_cache(maxsize=256, typed=True)  # 3.0 is not 3
def block_shape(levels: int) -> tuple[int, int]:
    """Symbols s and bits width(s) of a full block: rule 2."""
    if not isinstance(levels, int | np.integer) or not 2 <= levels <= 256:
        raise ValueError(f"levels: got {levels!r}, expected a whole number from 2 to 256")
    widths = {size: _width(size, int(levels)) for size in range(1, BLOCK_BITS + 1)}
    fitting = [size for size, width in widths.items() if width <= BLOCK_BITS]
    best = max(fitting, key=lambda size: (Fraction(size, widths[size]), size))
    return best, widths[best]


def _width(count: int, levels: int) -> int:
    most: int = levels**count - 1
    return most.bit_length()


@lru_cache(maxsize=8)
def _blocks(levels: int) -> tuple[NDArray[np.uint64], u64, NDArray[np.uint64], u64]:
    """(powers, width, digits, c): the blocks of the kernels, and how their numbers are taken apart.

    Entry v of the levels^c of `digits` holds the c digits of v in base `levels`, one per byte, lowest first. c is such
    that the table stays in the cache and splits a block into parts of about the same length.
    """
    if levels & (levels - 1) == 0:
        return np.array([1, levels], np.uint64), u64(levels.bit_length() - 1), np.zeros(0, np.uint64), u64(0)
    size, width = block_shape(levels)
    most = max(c for c in range(1, 9) if c == 1 or levels**c <= TABLE_ENTRIES)
    parts = -(-size // most)
    chunk = -(-size // parts)
    values = np.arange(levels**chunk, dtype=np.uint64)
    digits = np.zeros_like(values)
    for digit in range(chunk):
        digits |= (values // u64(levels**digit) % u64(levels)) << u64(8 * digit)
    return np.array([levels**n for n in range(size + 1)], np.uint64), u64(width), digits, u64(chunk)
