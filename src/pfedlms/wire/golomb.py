"""Positions ↔ bits: which k of n places, as a Golomb code of the gaps between them.

    gap of a position = places left out between it and the one before (for the first: before it)
    code of a gap g   = g >> b ones, a zero, then the lowest b bits of g, lowest first
    b                 = the least b ≥ 0 with (1 − k/n)^(2^b) < φ − 1 = (√5 − 1)/2

Codes follow one another directly; bit j of the stream is bit j % 8 of byte j // 8, and unused bits of the last byte
are zero. Both ends know k, so a reader finds the end of the stream. Every list of positions has one encoding.

For k of n places chosen at random, p = k/n, a position takes about b + 1/(1 − (1 − p)^(2^b)) bits, within 2.2 % of the
entropy H(p)/p for p ≤ 0.1, and all of them never take more than k (b + 1) + ((n − k) >> b) bits.

Reference: Golomb, "Run-Length Encodings", IEEE Trans. Inf. Theory 1966; b is that of Sattler et al., IEEE TNNLS 2020,
1 + ⌊log₂(log(φ − 1)/log(1 − p))⌋ there, for p = k/n, and 0 where that is negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import ClassVar

import numpy as np

from pfedlms import rng
from pfedlms.checks import check_integer
from pfedlms.errors import DecodeError
from pfedlms.wire.fields import Array, Field, Values
from pfedlms.wire.kernels import Words, gaps_bits, gaps_end, pack_gaps, u64, unpack_gaps

MOST_PLACES = 1 << 48  # so that the b bits of a gap, wherever in a byte they start, lie within 64
_COUNT_BYTES = 4
_LARGEST_COUNT = (1 << 8 * _COUNT_BYTES) - 1


def remainder_bits(count: int, places: int) -> int:
    """b for `count` of `places` positions, in float64, every product rounded by itself."""
    unchosen, bits = (places - count) / places, 0
    while unchosen >= (sqrt(5) - 1) / 2:
        unchosen *= unchosen
        bits += 1
    return bits


@dataclass(frozen=True)
class Positions(Field):
    """`count` different places below `places`, ascending. Value: int64 `[count]`."""

    name: str
    count: int
    places: int
    dtype: ClassVar[type[np.generic]] = np.int64
    _bits: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.places <= MOST_PLACES:
            raise ValueError(
                f"field {self.name!r}: got {self.count} of {self.places} places, expected 1 up to all of them, and at "
                f"most {MOST_PLACES} places"
            )
        bits = remainder_bits(self.count, self.places)
        longest = self.count * (bits + 1) + ((self.places - self.count) >> bits)
        vars(self).update(max_bytes=(longest + 7) // 8, _bits=bits)

    def size(self, values: Values) -> int:
        return self._check_positions(values)[1]

    def encoded_size(self, data: memoryview, known: Values) -> int:
        stream = np.frombuffer(data.toreadonly(), np.uint8)
        return (int(gaps_end(stream, u64(self.count), u64(self._bits))) + 7) // 8

    def write(self, values: Values, out: memoryview) -> None:
        positions, size = self._check_positions(values)
        stream = np.frombuffer(out, np.uint8)
        if stream.size != size:  # the kernel does not check bounds
            raise ValueError(f"field {self.name!r}: got {stream.size} bytes to write to, expected {size}")
        pack_gaps(positions, stream, u64(self._bits))

    def _check_positions(self, values: Values) -> tuple[Words, int]:
        """The positions, and the bytes of their code; raise ValueError if they do not ascend or are out of range."""
        positions = self.check_value(values).view(np.uint64)
        positions.flags.writeable = False  # numba compiles a kernel for read-only inputs and again for others
        good, bits = map(int, gaps_bits(positions, u64(self.places), u64(self._bits)))
        if good < self.count:
            raise ValueError(
                f"field {self.name!r}: got {positions.view(np.int64)[good]} at index {good}, expected ascending "
                f"numbers from 0 to {self.places - 1}"
            )
        return positions, (bits + 7) // 8

    def read(self, data: memoryview, known: Values) -> Array:
        stream, out = np.frombuffer(data.toreadonly(), np.uint8), np.empty(self.count, np.int64)
        good, bits = map(int, unpack_gaps(stream, out.view(np.uint64), u64(self.places), u64(self._bits)))
        if good < self.count:
            raise DecodeError(
                f"field {self.name!r}: got position {good} of {self.count} beyond the last place or the end of "
                f"{stream.size} bytes, expected {self.count} ascending positions below {self.places}"
            )
        if (bits + 7) // 8 != stream.size or stream[-1] >> ((bits - 1) % 8 + 1):
            raise DecodeError(
                f"field {self.name!r}: got {stream.size} bytes with last byte 0x{stream[-1]:02x}, expected {bits} bits "
                "and zeros behind them"
            )
        return out

    def example(self) -> Array:
        """Random positions: they give the average size of a message, not the largest."""
        draw = rng.generator(rng.stream(0, "example-positions"))
        return np.sort(draw.choice(self.places, self.count, replace=False, shuffle=False))


@dataclass(frozen=True)
class Count(Field):
    """A whole number below 2^32, little endian. Value: int64 `[1]`."""

    name: str
    dtype: ClassVar[type[np.generic]] = np.int64

    def __post_init__(self) -> None:
        vars(self).update(count=1, max_bytes=_COUNT_BYTES)

    def write(self, values: Values, out: memoryview) -> None:
        count = check_integer(f"field {self.name!r}", self.check_value(values).item(), 0, _LARGEST_COUNT)
        out[:] = count.to_bytes(_COUNT_BYTES, "little")

    def read(self, data: memoryview, known: Values) -> Array:
        return np.array([int.from_bytes(data, "little")])


@dataclass(frozen=True)
class Places(Field):
    """A mask of few ones, as positions: how many there are in 4 bytes, little endian, then their `Positions`, or
    nothing if there are none. Value: bool `[count]`."""

    name: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.bool_

    def __post_init__(self) -> None:
        # The code is longest where 38 % of the mask is true: 1.07 bits for each entry of the mask.
        vars(self).update(max_bytes=_COUNT_BYTES + 1 + self.count * 9 // 64 + 8)

    def size(self, values: Values) -> int:
        positions = np.flatnonzero(values[self.name])
        return _COUNT_BYTES + (self._positions(len(positions)).size({self.name: positions}) if len(positions) else 0)

    def encoded_size(self, data: memoryview, known: Values) -> int:
        if len(data) < _COUNT_BYTES:
            return _COUNT_BYTES
        chosen = self._read_count(data)
        return _COUNT_BYTES + (self._positions(chosen).encoded_size(data[_COUNT_BYTES:], known) if chosen else 0)

    def write(self, values: Values, out: memoryview) -> None:
        positions = np.flatnonzero(self.check_value(values))
        out[:_COUNT_BYTES] = len(positions).to_bytes(_COUNT_BYTES, "little")
        if len(positions):
            self._positions(len(positions)).write({self.name: positions}, out[_COUNT_BYTES:])

    def read(self, data: memoryview, known: Values) -> Array:
        out, chosen = np.zeros(self.count, np.bool_), self._read_count(data)
        if chosen:
            out[self._positions(chosen).read(data[_COUNT_BYTES:], known)] = True
        return out

    def example(self) -> Array:
        return np.zeros(self.shape, np.bool_)

    def _read_count(self, data: memoryview) -> int:
        chosen = int.from_bytes(data[:_COUNT_BYTES], "little")
        if chosen > self.count:
            raise DecodeError(f"field {self.name!r}: got {chosen} places, expected at most {self.count}")
        return chosen

    def _positions(self, chosen: int) -> Positions:
        return Positions(self.name, chosen, self.count)
