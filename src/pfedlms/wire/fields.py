"""Field codecs: the kinds of values a message is made of, and the message a method declares from them.

A method names its fields and their sizes; both ends derive every length from that declaration, so a payload is the
plain concatenation of its fields. Values are NumPy arrays without a clients axis; numbers are little endian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DecodeError, OversizedError, TruncatedError
from pfedlms.wire.codec import Segments, pack, pack_segments, packed_size, unpack, unpack_segments

Values = Mapping[str, NDArray[np.generic]]


class Field(ABC):
    """One named part of a message."""

    name: str

    @property
    @abstractmethod
    def max_bytes(self) -> int:
        """Most bytes the field can take; fields of fixed size always take this many."""

    @abstractmethod
    def encode(self, values: Values) -> bytes:
        """Bytes of `values[self.name]`."""

    @abstractmethod
    def size(self, known: Values) -> int:
        """Bytes the field takes, given the fields before it."""

    @abstractmethod
    def decode(self, data: memoryview, known: Values) -> NDArray[np.generic]:
        """Value from exactly `size(known)` bytes; raises DecodeError for values that cannot have been sent."""

    @abstractmethod
    def example(self) -> NDArray[np.generic]:
        """A valid value of the largest size, to measure messages with."""


class _Fixed(Field):
    def size(self, known: Values) -> int:
        return self.max_bytes


@dataclass(frozen=True)
class Symbols(_Fixed):
    """Symbols below `levels` in segments (one a layer), each packed and padded to whole bytes. Value: uint8
    `[sum(segments)]`."""

    name: str
    segments: tuple[int, ...]
    levels: int

    @cached_property
    def _packing(self) -> Segments:
        return Segments(self.segments, self.levels)

    @property
    def max_bytes(self) -> int:
        return self._packing.bytes

    def encode(self, values: Values) -> bytes:
        return pack_segments(np.asarray(values[self.name], dtype=np.uint8), self._packing)

    def decode(self, data: memoryview, known: Values) -> NDArray[np.generic]:
        return unpack_segments(data, self._packing)

    def example(self) -> NDArray[np.generic]:
        return np.zeros(sum(self.segments), dtype=np.uint8)


@dataclass(frozen=True)
class Signs(_Fixed):
    """Signs, one bit each (set: +1). Value: float32 `[count]` of ±1; zero counts as +1."""

    name: str
    count: int

    @property
    def max_bytes(self) -> int:
        return packed_size(self.count, 2)

    def encode(self, values: Values) -> bytes:
        return pack((np.asarray(values[self.name], dtype=np.float32) >= 0).astype(np.uint8), 2)

    def decode(self, data: memoryview, known: Values) -> NDArray[np.generic]:
        return unpack(data, self.count, 2).astype(np.float32) * np.float32(2) - np.float32(1)

    def example(self) -> NDArray[np.generic]:
        return np.ones(self.count, dtype=np.float32)


@dataclass(frozen=True)
class Floats(_Fixed):
    """A float32 vector, finite and not below `minimum`. Value: float32 `[count]`."""

    name: str
    count: int
    minimum: float = -np.inf

    @property
    def max_bytes(self) -> int:
        return 4 * self.count

    def encode(self, values: Values) -> bytes:
        return np.asarray(values[self.name], dtype="<f4").tobytes()

    def decode(self, data: memoryview, known: Values) -> NDArray[np.generic]:
        return _finite(self.name, np.frombuffer(data, dtype="<f4").astype(np.float32), self.minimum)

    def example(self) -> NDArray[np.generic]:
        return np.full(self.count, max(0.0, self.minimum), dtype=np.float32)


def Scalar(name: str, minimum: float = -np.inf) -> Floats:
    """A single float32. Value: float32 `[1]`."""
    return Floats(name, 1, minimum)


@dataclass(frozen=True)
class Mask(_Fixed):
    """Yes or no for each of `count` things, one bit each. Value: bool `[count]`."""

    name: str
    count: int

    @property
    def max_bytes(self) -> int:
        return packed_size(self.count, 2)

    def encode(self, values: Values) -> bytes:
        return pack(np.asarray(values[self.name], dtype=bool).astype(np.uint8), 2)

    def decode(self, data: memoryview, known: Values) -> NDArray[np.generic]:
        return unpack(data, self.count, 2).astype(bool)

    def example(self) -> NDArray[np.generic]:
        return np.ones(self.count, dtype=bool)


@dataclass(frozen=True)
class MaskedRows(Field):
    """Rows of float32 for which an earlier Mask says yes; the others are not sent and read as zero. Value: float32
    `[count, width]`."""

    name: str
    mask: str
    count: int
    width: int

    @property
    def max_bytes(self) -> int:
        return 4 * self.count * self.width

    def size(self, known: Values) -> int:
        return 4 * self.width * int(np.count_nonzero(known[self.mask]))

    def encode(self, values: Values) -> bytes:
        rows = np.asarray(values[self.name], dtype="<f4").reshape(self.count, self.width)
        return bytes(rows[np.asarray(values[self.mask], dtype=bool)].tobytes())

    def decode(self, data: memoryview, known: Values) -> NDArray[np.generic]:
        result = np.zeros((self.count, self.width), dtype=np.float32)
        sent = np.asarray(known[self.mask], dtype=bool)
        result[sent] = _finite(self.name, np.frombuffer(data, dtype="<f4").reshape(-1, self.width))
        return result

    def example(self) -> NDArray[np.generic]:
        return np.zeros((self.count, self.width), dtype=np.float32)


def _finite(name: str, values: NDArray[np.float32], minimum: float = -np.inf) -> NDArray[np.float32]:
    wrong = ~(np.isfinite(values) & (values >= minimum))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DecodeError(
            f"field {name!r}: got {values.flat[at]} at position {at}, expected a finite number of at least {minimum}"
        )
    return values


@dataclass(frozen=True)
class Message:
    """What one end sends in one direction of an exchange: a kind number and its fields in order."""

    kind: int
    fields: tuple[Field, ...]
    max_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_bytes", sum(part.max_bytes for part in self.fields))

    def encode(self, values: Values) -> bytes:
        return b"".join(part.encode(values) for part in self.fields)

    def decode(self, payload: memoryview) -> dict[str, NDArray[np.generic]]:
        """Values of all fields; the payload must end exactly where the last one does."""
        known: dict[str, NDArray[np.generic]] = {}
        at = 0
        for part in self.fields:
            size = part.size(known)
            if len(payload) - at < size:
                raise TruncatedError(
                    f"payload: got {len(payload)} bytes, expected at least {at + size} up to field {part.name!r}"
                )
            known[part.name] = part.decode(payload[at : at + size], known)
            at += size
        if at != len(payload):
            raise OversizedError(f"payload: got {len(payload)} bytes, expected {at}")
        return known

    def example(self) -> dict[str, NDArray[np.generic]]:
        return {part.name: part.example() for part in self.fields}
