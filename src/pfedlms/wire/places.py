"""Fields of messages that name some entries of a vector, as many as there are: a count, and a mask as positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pfedlms.errors import DecodeError
from pfedlms.wire.fields import Array, Field, Values
from pfedlms.wire.golomb import Positions

_COUNT_BYTES = 4


@dataclass(frozen=True)
class Count(Field):
    """A whole number below 2^32, little endian. Value: int64 `[1]`."""

    name: str
    dtype: ClassVar[type[np.generic]] = np.int64

    def __post_init__(self) -> None:
        vars(self).update(shape=(1,), max_bytes=_COUNT_BYTES)

    def write(self, values: Values, out: memoryview) -> None:
        out[:] = int(self.given(values)[0]).to_bytes(_COUNT_BYTES, "little")

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        out[0] = int.from_bytes(data, "little")


@dataclass(frozen=True)
class Places(Field):
    """Some of `count` places: how many in 4 bytes, little endian, then `Positions` of that many, or nothing for none.
    Value: bool `[count]`."""

    name: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.bool_

    def __post_init__(self) -> None:
        # Positions take most bits for 38 % of all places: 1.07 for each place.
        vars(self).update(shape=(self.count,), max_bytes=_COUNT_BYTES + 1 + self.count * 9 // 64 + 8)

    def size(self, values: Values) -> int:
        positions = np.flatnonzero(values[self.name])
        return _COUNT_BYTES + (self._of(len(positions)).size({self.name: positions}) if len(positions) else 0)

    def taken(self, data: memoryview, known: Values) -> int:
        if len(data) < _COUNT_BYTES:
            return _COUNT_BYTES
        chosen = self._chosen(data)
        return _COUNT_BYTES + (self._of(chosen).taken(data[_COUNT_BYTES:], known) if chosen else 0)

    def write(self, values: Values, out: memoryview) -> None:
        positions = np.flatnonzero(self.given(values))
        out[:_COUNT_BYTES] = len(positions).to_bytes(_COUNT_BYTES, "little")
        if len(positions):
            self._of(len(positions)).write({self.name: positions}, out[_COUNT_BYTES:])

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        out[:], chosen = False, self._chosen(data)
        if chosen:
            positions = np.empty(chosen, np.int64)
            self._of(chosen).read(data[_COUNT_BYTES:], known, positions)
            out[positions] = True

    def example(self) -> Array:
        return np.zeros(self.shape, np.bool_)

    def _chosen(self, data: memoryview) -> int:
        chosen = int.from_bytes(data[:_COUNT_BYTES], "little")
        if chosen > self.count:
            raise DecodeError(f"field {self.name!r}: got {chosen} places, expected at most {self.count}")
        return chosen

    def _of(self, chosen: int) -> Positions:
        return Positions(self.name, chosen, self.count)
