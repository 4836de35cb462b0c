"""Symbols ↔ bits: the payload of every quantised message.

Symbols q(i) are in {0, …, levels-1}; levels = T+1 in the paper. Three rules in exact integers define their bit
stream, so that any language reproduces it:

1.  n symbols take  width(n) = bit_length(levels**n - 1)  bits, the fewest that tell all combinations apart.
2.  The block size s is the one with width(s) <= 56 that takes the fewest bits per symbol, width(s)/s, and the
    largest such on a tie. (s takes fewer than t when width(s)*t < width(t)*s.)
3.  The symbols are cut into blocks of s; the rest is a last, shorter block. A block of n symbols is the
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

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.backend import row_memory, run_kernel
from pfedlms.checks import as_array, check_integer
from pfedlms.errors import DecodeError
from pfedlms.rng import SIGNS_OF_BYTE
from pfedlms.wire.fields import Array, RowField, Values
from pfedlms.wire.kernels import Bytes, pack_rows, u64, unpack_rows, unpack_symbols

Buffer = bytes | bytearray | memoryview

BLOCK_BITS = 56
TABLE_ENTRIES = 1 << 16  # half a megabyte, which stays in the second-level cache


def pack(symbols: Bytes | torch.Tensor, levels: int) -> bytes:
    """Write `symbols: uint8 [count]`, each below `levels` (2 to 256), as `packed_size(count, levels)` bytes.

    >>> pack(np.array([1, 2, 0, 2], np.uint8), levels=3).hex()  # 1 + 2*3 + 0*9 + 2*27 = 61
    '3d'
    """
    array = as_array("symbols", symbols)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"symbols: got {array.dtype} of shape {list(array.shape)}, expected uint8 of shape [count]")
    field = Symbols("symbols", (array.size,), levels)
    out = np.empty(field.max_bytes, np.uint8)
    field.write({"symbols": array}, out.data)
    return out.tobytes()


def unpack(data: Buffer, count: int, levels: int) -> Bytes:
    """Read back the `count` symbols that `pack` wrote, `uint8 [count]`. Raise DecodeError for bytes that `pack` does
    not write: of another length, with a block above levels^n - 1, or with a bit set after the end."""
    return Symbols("symbols", (count,), levels).read(memoryview(data), {})


def packed_size(count: int, levels: int) -> int:
    """Bytes of `count` packed symbols: ceil(stream bits / 8), which is ceil(count * b / 8) for levels = 2^b."""
    return Symbols("symbols", (count,), levels).max_bytes


@dataclass(frozen=True)
class Symbols(RowField):
    """Symbols below `levels` in segments (one per layer), each packed and padded to whole bytes. Value: uint8
    `[sum(segments)]`."""

    name: str
    segments: tuple[int, ...]
    levels: int
    dtype: ClassVar[type[np.generic]] = np.uint8
    _table: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """A row for each segment: its first and last symbol, its first and last byte, the bits used of the last byte."""

    def __post_init__(self) -> None:
        levels = check_integer("levels", self.levels, 2, 256)
        size, width = block_shape(levels)
        rows, symbols, byte = [], 0, 0
        for count in (check_integer("segments", size, 0) for size in self.segments):
            blocks, rest = divmod(count, size)
            bits = blocks * width + _width(rest, levels)
            last, end = symbols + count, byte + (bits + 7) // 8
            rows.append((symbols, last, byte, end, bits % 8 or 8))
            symbols, byte = last, end
        table = np.array(rows, np.int64).reshape(-1, 5)
        vars(self).update(levels=levels, count=symbols, max_bytes=byte, _table=table)

    def write_rows(self, values: Values, out: Array) -> None:
        symbols, (flat, stride) = self._check_symbols(self.check_value(values, len(out))), row_memory(out)
        powers, width, _, _ = _blocks(self.levels)
        run_kernel(pack_rows, len(symbols), symbols.shape[1], symbols, flat, stride, self._table, powers, width)

    def read_rows(self, data: Array) -> Array:
        flat, stride = row_memory(data)
        flat.flags.writeable = False
        symbols = np.empty((len(data), *self.shape), np.uint8)
        refused, blocks = np.zeros(1, np.uint8), _blocks(self.levels)
        run_kernel(unpack_rows, len(symbols), symbols.shape[1], flat, stride, symbols, self._table, *blocks, refused)
        if refused[0]:
            raise DecodeError(next(filter(None, map(self._refusal, data))))
        return symbols

    def _refusal(self, row: Array) -> str:
        """Why a row is refused; empty if it is valid."""
        size, width = block_shape(self.levels)
        for first, last, start, stop, used in self._table:
            packed, unpacked = row[start:stop], np.empty(last - first, np.uint8)
            if packed.size and packed[-1] >> used:
                return f"packed symbols: got last byte 0x{packed[-1]:02x}, expected only its lowest {used} bits in use"
            good = int(unpack_symbols(packed, unpacked, *_blocks(self.levels)))
            if good < unpacked.size:
                block, count = good // size, min(size, unpacked.size - good)
                covering = packed[block * width // 8 :][:8].tobytes()
                value = (int.from_bytes(covering, "little") >> block * width % 8) % 2 ** _width(count, self.levels)
                most = f"{self.levels}**{count} = {self.levels**count}"
                return f"packed symbols, block {block}: got {value}, expected below {most}"
        return ""

    def _check_symbols(self, symbols: Bytes) -> Bytes:
        """The symbols, read-only, because numba compiles a kernel once for read-only inputs and once for others; raise
        ValueError if one is not below `levels`."""
        if symbols.size and int(symbols.max()) >= self.levels:
            at = tuple(np.argwhere(symbols >= self.levels)[0].tolist())
            raise ValueError(
                f"symbols[{at[-1]}]: got {symbols[at]}, expected a value below {self.levels}, the number of levels"
            )
        read_only = symbols.view()
        read_only.flags.writeable = False
        return read_only


@dataclass(frozen=True)
class Bits(RowField):
    """`count` signs or truth values, one bit each, which the method has packed already (for example on a GPU) as
    `Signs` packs them. Value: uint8 `[ceil(count / 8)]`."""

    name: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.max_bytes,)

    @cached_property
    def max_bytes(self) -> int:
        return -(-self.count // 8)

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = self.check_value(values, len(out))
        self._check_rows(out, ValueError)

    def read_rows(self, data: Array) -> Array:
        self._check_rows(data, DecodeError)
        return data

    def _check_rows(self, rows: Array, error: type[Exception]) -> None:
        """Refuse a bit that is set after the end."""
        if self.count % 8 and (wrong := rows[:, -1][rows[:, -1] >> self.count % 8 != 0]).size:
            raise error(
                f"field {self.name!r}: got last byte 0x{wrong[0]:02x}, expected only its lowest {self.count % 8} bits "
                "in use"
            )


class Mask(Bits):
    """`count` truth values, one bit each. Value: bool `[count]`."""

    dtype: ClassVar[type[np.generic]] = np.bool_

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = np.packbits(self.check_value(values, len(out)), axis=1, bitorder="little")

    def read_rows(self, data: Array) -> Array:
        return np.unpackbits(super().read_rows(data), axis=1, count=self.count, bitorder="little").view(np.bool_)


class Signs(Mask):
    """Signs, one bit each, which is set for +1. Value: float32 `[count]` of ±1; zero counts as +1."""

    dtype = np.float32

    def write_rows(self, values: Values, out: Array) -> None:
        numbers = self.check_value(values, len(out))
        if np.isnan(np.min(numbers, initial=0)):  # the least of several numbers is NaN if one of them is
            raise ValueError(f"field {self.name!r}: got nan, expected numbers, which have a sign")
        out[:] = np.packbits(numbers >= 0, axis=1, bitorder="little")

    def read_rows(self, data: Array) -> Array:
        self._check_rows(data, DecodeError)
        return SIGNS_OF_BYTE.take(data, axis=0).reshape(len(data), 8 * data.shape[1])[:, : self.count]


@lru_cache(maxsize=256)
def block_shape(levels: int) -> tuple[int, int]:
    """Rule 2: the symbols s and the bits width(s) of a full block."""
    shapes = ((size, _width(size, levels)) for size in range(1, BLOCK_BITS + 1))
    return max((shape for shape in shapes if shape[1] <= BLOCK_BITS), key=lambda shape: (Fraction(*shape), shape))


def _width(count: int, levels: int) -> int:
    width: int = (levels**count - 1).bit_length()
    return width


@lru_cache(maxsize=8)
def _blocks(levels: int) -> tuple[NDArray[np.uint64], u64, NDArray[np.uint64], u64]:
    """What kernels need to know of blocks: (powers, width, digits, c).

    `digits` has levels^c entries. Entry v holds the c digits of v in base `levels`, one per byte, lowest first. c is
    chosen so that the table stays in the cache and splits a block into parts of about the same length.
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
