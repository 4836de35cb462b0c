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

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.backend import row_memory, run_kernel
from pfedlms.errors import DecodeError
from pfedlms.rng import SIGNS_OF_BYTE
from pfedlms.wire.fields import Array, InRows, Values
from pfedlms.wire.kernels import (
    Bytes,
    pack_rows,
    u64,
    unpack_rows,
    unpack_symbols,
)

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
        raise ValueError(f"symbols: got {given.dtype} of shape {list(given.shape)}, expected uint8 of shape [count]")
    host = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    alone = Symbols("symbols", (host.size,), levels)
    out = np.empty(alone.max_bytes, np.uint8)
    alone.write({"symbols": host}, out.data)
    return out.tobytes()


def unpack(data: Buffer, count: int, levels: int) -> Bytes:
    """Read back the `count` symbols that `pack` wrote, a new `uint8 [count]`, and refuse every other byte string: one
    of another length, with a block beyond levels^n - 1, or with a bit set after the end (DecodeError)."""
    alone, given = Symbols("symbols", (count,), levels), memoryview(data)
    if given.nbytes != alone.max_bytes:
        raise DecodeError(
            f"packed symbols: got {given.nbytes} bytes, expected {alone.max_bytes} ({count} symbols, {levels} levels)"
        )
    out = np.empty(alone.shape, np.uint8)
    alone.read(given, {}, out)
    return out


def packed_size(count: int, levels: int) -> int:
    """Bytes of `count` packed symbols: ceil(stream bits / 8), which is ceil(count * b / 8) for levels = 2^b."""
    return Symbols("symbols", (count,), levels).max_bytes


@dataclass(frozen=True)
class Symbols(InRows):
    """Symbols below `levels` in segments (one per layer), each packed and padded to whole bytes. Value: uint8
    `[sum(segments)]`."""

    name: str
    segments: tuple[int, ...]
    levels: int
    dtype: ClassVar[type[np.generic]] = np.uint8
    _places: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """Of every segment: first and last symbol, first and last byte, bits used of the last byte."""

    def __post_init__(self) -> None:
        size, width = block_shape(self.levels)
        places, symbols, byte = [], 0, 0
        for count in self.segments:
            if not isinstance(count, int | np.integer) or count < 0:
                raise ValueError(f"count: got {count!r}, expected a whole number of symbols, 0 or more")
            blocks, rest = divmod(int(count), size)
            bits = blocks * width + _width(rest, int(self.levels))
            last, end = symbols + int(count), byte + (bits + 7) // 8
            places.append((symbols, last, byte, end, bits % 8 or 8))
            symbols, byte = last, end
        table = np.array(places, np.int64).reshape(-1, 5)
        vars(self).update(levels=int(self.levels), shape=(symbols,), max_bytes=byte, _places=table)

    def write_rows(self, values: Values, out: Array) -> None:
        given, (flat, stride) = self._to_pack(self.given(values, len(out))), row_memory(out)
        powers, width, _, _ = _blocks(self.levels)
        run_kernel(pack_rows, len(given), given.shape[1], given, flat, stride, self._places, powers, width)

    def read_rows(self, data: Array, room: Array | None = None) -> Array | None:
        flat, stride = row_memory(data)
        flat.flags.writeable = False
        found = np.empty((len(data), *self.shape), np.uint8) if room is None else room
        refused = np.zeros(1, np.uint8)
        run_kernel(
            unpack_rows, len(found), found.shape[1], flat, stride, found, self._places, *_blocks(self.levels), refused
        )  # fmt: skip
        return None if refused[0] else found

    def refusal(self, row: Array) -> str:
        size, width = block_shape(self.levels)
        for first, last, start, stop, used in self._places:
            packed, unpacked = row[start:stop], np.empty(last - first, np.uint8)
            if packed.size and packed[-1] >> used:
                return f"packed symbols: got last byte 0x{packed[-1]:02x}, expected only its lowest {used} bits in use"
            good = int(unpack_symbols(packed, unpacked, *_blocks(self.levels)))
            if good < unpacked.size:
                break
        block, count = good // size, min(size, unpacked.size - good)
        covering = packed[block * width // 8 :][:8].tobytes()
        value = (int.from_bytes(covering, "little") >> block * width % 8) % 2 ** _width(count, self.levels)
        most = f"{self.levels}**{count} = {self.levels**count}"
        return f"packed symbols, block {block}: got {value}, expected below {most}"

    def _to_pack(self, given: Bytes) -> Bytes:
        """Symbols that are all below `levels`, read-only: numba compiles a kernel for such inputs and again for
        others."""
        if given.size and int(given.max()) >= self.levels:
            at = tuple(np.argwhere(given >= self.levels)[0].tolist())
            raise ValueError(
                f"symbols[{at[-1]}]: got {given[at]}, expected a value below {self.levels}, the number of levels"
            )
        own = given.view()
        own.flags.writeable = False
        return own


@dataclass(frozen=True)
class Bits(InRows):
    """`count` signs or truth values, one bit each, that are packed already (for example on a GPU), as the bytes of
    `Signs`. Value: uint8 `[ceil(count / 8)]`."""

    name: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.uint8

    def __post_init__(self) -> None:
        size = packed_size(self.count, levels=2)
        vars(self).update(shape=(size,) if self.dtype is np.uint8 else (self.count,), max_bytes=size)

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = self.given(values, len(out))
        if self.count % 8 and len(wrong := out[self._beyond(out)]):
            raise ValueError(self.refusal(wrong[0]))

    def read_rows(self, data: Array, room: Array | None = None) -> Array | None:
        return None if self.count % 8 and self._beyond(data).any() else self._unpacked(data, room)

    def refusal(self, row: Array) -> str:
        return (
            f"field {self.name!r}: got last byte 0x{row[-1]:02x}, expected only its lowest {self.count % 8} bits in use"
        )

    def _beyond(self, rows: Array) -> NDArray[np.bool_]:
        """The rows in which bits after the end are set."""
        return np.asarray(rows[:, -1] >> self.count % 8 != 0)

    def _unpacked(self, packed: Array, room: Array | None) -> Array:
        return packed


class Mask(Bits):
    """`count` truth values, one bit each. Value: bool `[count]`."""

    dtype: ClassVar[type[np.generic]] = np.bool_

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = np.packbits(self._is_set(self.given(values, len(out))), axis=1, bitorder="little")

    def _is_set(self, values: Array) -> Array:
        """Which bits are set."""
        return values

    def _unpacked(self, packed: Array, room: Array | None) -> Array:
        return np.unpackbits(packed, axis=1, count=self.count, bitorder="little").view(np.bool_)


class Signs(Mask):
    """Signs, a mask of those that are +1. Value: float32 `[count]` of ±1; zero counts as +1."""

    dtype = np.float32

    def _is_set(self, values: Array) -> Array:
        return np.asarray(values >= 0)

    def _unpacked(self, packed: Array, room: Array | None) -> Array:
        if room is None or self.count % 8:
            room = np.empty((len(packed), 8 * packed.shape[1]), np.float32)
        SIGNS_OF_BYTE.take(packed, axis=0, out=room.reshape(*packed.shape, 8), mode="clip")  # which needs no buffer
        return room[:, : self.count] if self.count % 8 else room


@lru_cache(maxsize=256, typed=True)  # 3.0 is not 3
def block_shape(levels: int) -> tuple[int, int]:
    """Symbols s and bits width(s) of a full block: rule 2."""
    if not isinstance(levels, int | np.integer) or not 2 <= levels <= 256:
        raise ValueError(f"levels: got {levels!r}, expected a whole number from 2 to 256")
    shapes = ((size, _width(size, int(levels))) for size in range(1, BLOCK_BITS + 1))
    return max((shape for shape in shapes if shape[1] <= BLOCK_BITS), key=lambda shape: (Fraction(*shape), shape))


def _width(count: int, levels: int) -> int:
    return int(levels**count - 1).bit_length()


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
