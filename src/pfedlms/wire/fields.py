"""Field codecs: the kinds of values a message is made of, and the message a method declares from them. (Those of few
levels are in `codec`, positions in `golomb`.)

A method names its fields and their sizes; both ends derive every length from that declaration, or see where a field
ends from its own bits, so a payload is the plain concatenation of its fields. Values are NumPy arrays without a clients
axis; numbers are little endian. Fields are written into an existing buffer (a part of a frame) and read into existing
arrays (a sender's row of `Message.room`), without extra copies.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pfedlms.backend import run_kernel
from pfedlms.errors import DecodeError, OversizedError, TruncatedError
from pfedlms.wire.kernels import check_finite, copy_finite

Array = NDArray[Any]
Values = Mapping[str, Array]

_FEW = 64  # numbers that Python checks faster than it calls a kernel


class Field(ABC):
    """One named part of a message."""

    name: str
    dtype: ClassVar[type[np.generic]] = np.float32
    shape: tuple[int, ...]
    """Of one sender's value; set where a field is made."""
    minimum: float = -np.inf
    """Of every number in it."""

    @cached_property
    def max_bytes(self) -> int:
        """Most bytes the field can take; fields of fixed size always take this many."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def size(self, values: Values) -> int:
        """Bytes the field takes, given the fields before it."""
        return self.max_bytes

    def taken(self, data: memoryview, known: Values) -> int:
        """Bytes the field takes at the beginning of `data`, for a reader who knows the fields before it; more than
        there are where some are missing."""
        return self.size(known)

    @abstractmethod
    def write(self, values: Values, out: memoryview) -> None:
        """Encode `values[self.name]` as the `size(values)` bytes of `out`."""

    @abstractmethod
    def read(self, data: memoryview, known: Values, out: Array) -> None:
        """Decode exactly the bytes `taken` into `out`; raises DecodeError for values that cannot have been sent."""

    def example(self) -> Array:
        """A valid value to measure messages with: of the largest size, unless a field overrides this."""
        return np.full(self.shape, max(1, self.minimum), self.dtype)

    def given(self, values: Values, *senders: int) -> Array:
        """The value to write, or those of so many senders, contiguous; a copy only where it is not so already."""
        value = np.ascontiguousarray(values[self.name], dtype=self.dtype)
        expected = (*senders, *self.shape)
        if value.shape != expected:
            raise ValueError(f"field {self.name!r}: got shape {list(value.shape)}, expected {list(expected)}")
        return value


class InRows(Field):
    """A field of which many senders' values can be written and read at once: rows of arrays, all of one size. One
    sender's value is a single row."""

    def rows_size(self, values: Values) -> int | None:
        """Bytes the field takes in every row, given the fields before it; None where rows differ."""
        return self.max_bytes

    @abstractmethod
    def write_rows(self, values: Values, out: Array) -> None:
        """Encode `values[self.name]: [senders, …]` as the rows of `out`, uint8 `[senders, size]`."""

    @abstractmethod
    def read_rows(self, data: Array, room: Array | None = None) -> Array | None:
        """The values of the rows of `data`, which may be views of it, or lie in `room`; None where one of them must be
        refused."""

    def refusal(self, row: Array) -> str:
        """Why `read_rows` refuses this row."""
        raise NotImplementedError  # of fields that take all bytes

    def write(self, values: Values, out: memoryview) -> None:
        given, row = self.given(values), np.frombuffer(out, np.uint8)
        if row.size != self.size(values):  # kernels rely on it
            raise ValueError(f"field {self.name!r}: got {row.size} bytes to write to, expected {self.size(values)}")
        self.write_rows({self.name: given[None]}, row[None])

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        row = np.frombuffer(data, np.uint8)
        if row.size != self.size(known):
            raise DecodeError(f"field {self.name!r}: got {row.size} bytes, expected {self.size(known)}")
        room = out[None]
        found = self.read_rows(row[None], room)
        if found is None:
            raise DecodeError(self.refusal(row))
        if found is not room:
            out[:] = found[0]


@dataclass(frozen=True)
class Floats(InRows):
    """A float32 vector, finite and not below `minimum`. Value: float32 `[count]`. Several threads copy a long one."""

    name: str
    count: int
    minimum: float = -np.inf

    def __post_init__(self) -> None:
        vars(self).update(shape=(self.count,))

    def write(self, values: Values, out: memoryview) -> None:
        target, given = np.frombuffer(out, dtype="<f4"), self.given(values)
        if self.count <= _FEW:
            target[:] = given
            return
        run_kernel(lambda first, last: np.copyto(target[first:last], given[first:last]), self.count, 1)

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        _read_floats(self.name, data, out, self.minimum)

    def write_rows(self, values: Values, out: Array) -> None:
        given = self.given(values, len(out)).astype("<f4", copy=False).view(np.uint8)
        run_kernel(lambda first, last: np.copyto(out[first:last], given[first:last]), len(out), self.count)

    def read_rows(self, data: Array, room: Array | None = None) -> Array | None:
        # A kernel reads whole numbers at their places.
        aligned = data.ctypes.data % 4 == data.strides[0] % 4 == 0
        found = (data if aligned else data.copy()).view("<f4")
        if self.count <= _FEW:
            return found if bool((np.isfinite(found) & (found >= np.float32(self.minimum))).all()) else None
        refused = np.zeros(1, np.uint8)

        def check(first: int, last: int) -> None:
            for row in found[first:last]:
                check_finite(row, self.minimum, refused)

        run_kernel(check, len(found), self.count)
        return None if refused[0] else found


def Scalar(name: str, minimum: float = -np.inf) -> Floats:
    """A single float32. Value: float32 `[1]`."""
    return Floats(name, 1, minimum)


@dataclass(frozen=True)
class MaskedRows(Field):
    """Rows of float32 for which an earlier Mask is true; the others are not sent and read as zero. Value: float32
    `[count, width]`."""

    name: str
    mask: str
    count: int
    width: int

    def __post_init__(self) -> None:
        vars(self).update(shape=(self.count, self.width))

    def size(self, values: Values) -> int:
        return 4 * self.width * int(np.count_nonzero(values[self.mask]))

    def write(self, values: Values, out: memoryview) -> None:
        sent = np.asarray(values[self.mask], dtype=bool)
        np.frombuffer(out, dtype="<f4").reshape(-1, self.width)[:] = self.given(values)[sent]

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        rows = np.empty(len(data) // 4, dtype=np.float32)
        _read_floats(self.name, data, rows)
        out[:] = 0
        out[known[self.mask]] = rows.reshape(-1, self.width)


@dataclass(frozen=True)
class MaskedBytes(InRows):
    """`count` bytes if an earlier Mask of count 1 is true; else they are not sent and read as zero. Value: uint8
    `[count]`."""

    name: str
    mask: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.uint8

    def __post_init__(self) -> None:
        vars(self).update(shape=(self.count,))

    def size(self, values: Values) -> int:
        return self.count if values[self.mask][0] else 0

    def rows_size(self, values: Values) -> int | None:
        sent = values[self.mask][:, 0]
        return self.count if sent.all() else None if sent.any() else 0

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = self.given(values, len(out))[:, : out.shape[1]]

    def read_rows(self, data: Array, room: Array | None = None) -> Array | None:
        return data if data.shape[1] else np.zeros((len(data), self.count), np.uint8)


def _read_floats(name: str, data: memoryview, out: Array, minimum: float = -np.inf) -> None:
    """Copy float32 numbers from `data` into `out`; refuse those that are not finite or below the minimum."""
    source = np.frombuffer(data, dtype="<f4")
    if len(out) <= _FEW:
        out[:] = source
        numbers, least = out.tolist(), float(np.float32(minimum))
        fine = all(map(isfinite, numbers)) and min(numbers, default=least) >= least
    else:
        if not source.flags.aligned:
            source = np.frombuffer(bytes(data), dtype="<f4")
        refused = np.zeros(1, np.uint8)
        run_kernel(copy_finite, len(out), 1, source, out, float(minimum), refused)
        fine = not refused[0]
    if not fine:
        at = int(np.argmin(np.isfinite(out) & (out >= minimum)))
        raise DecodeError(
            f"field {name!r}: got {out[at]} at position {at}, expected a finite number of at least {minimum}"
        )


@dataclass(frozen=True)
class Message:
    """What one end sends in one direction of an exchange: a kind number and its fields in order."""

    kind: int
    fields: tuple[Field, ...]

    @cached_property
    def max_bytes(self) -> int:
        return sum(part.max_bytes for part in self.fields)

    def size(self, values: Values) -> int:
        """Bytes of the payload of `values`."""
        return sum([part.size(values) for part in self.fields])

    def write(self, values: Values, out: memoryview) -> None:
        """Encode the values of all fields as the `size(values)` bytes of `out`."""
        at = 0
        for part in self.fields:
            end = at + part.size(values)
            part.write(values, out[at:end])
            at = end

    def read(self, payload: memoryview, into: Values | None = None) -> dict[str, Array]:
        """Values of all fields, in the arrays of `into` or in new ones; the payload must end exactly where the last
        one does."""
        known: dict[str, Array] = {}
        at, length = 0, len(payload)
        for part in self.fields:
            end = at + part.taken(payload[at:], known)
            if length < end:
                raise TruncatedError(f"payload: got {length} bytes, expected at least {end} up to field {part.name!r}")
            out = np.empty(part.shape, part.dtype) if into is None else into[part.name]
            if (out.shape, out.dtype) != (part.shape, part.dtype) or not out.flags.carray:
                raise ValueError(
                    f"room for field {part.name!r}: got {out.dtype} {list(out.shape)}, expected {part.dtype.__name__} "
                    f"{list(part.shape)}, contiguous and writable, as a row of `Message.room`"
                )
            part.read(payload[at:end], known, out)
            known[part.name] = out
            at = end
        if at != length:
            raise OversizedError(f"payload: got {length} bytes, expected {at}")
        return known

    @cached_property
    def in_rows(self) -> bool:
        """Whether all its fields are."""
        return len(self._rows) == len(self.fields)

    def rows_size(self, values: Values) -> int | None:
        """Bytes of the payload in every row of `values: [senders, …]`; None where rows differ."""
        sizes = [part.rows_size(values) for part in self._rows]
        return None if None in sizes else sum(filter(None, sizes))

    def write_rows(self, values: Values, out: Array) -> None:
        """`write` of every row of `values` into the rows of `out`, uint8 `[senders, rows_size(values)]`."""
        at = 0
        for part in self._rows:
            end = at + (part.rows_size(values) or 0)
            part.write_rows(values, out[:, at:end])
            at = end

    def read_rows(self, payloads: Array) -> dict[str, Array] | None:
        """`read` of every row of `payloads`, uint8 `[senders, size]`, if it would take all of them; else None. Values
        may be views of `payloads`."""
        known: dict[str, Array] = {}
        at, length = 0, payloads.shape[1]
        for part in self._rows:
            size = part.rows_size(known)
            if size is None or length < at + size:
                return None
            values = part.read_rows(payloads[:, at : at + size])
            if values is None:
                return None
            known[part.name] = values
            at += size
        return known if at == length else None

    @cached_property
    def only_floats(self) -> bool:
        """Whether all its fields are `Floats` without a minimum, and numbers are stored as the wire has them."""
        plain = len(self.floats) == len(self.fields) and all(part.minimum == -np.inf for part in self.floats)
        return sys.byteorder == "little" and plain

    @cached_property
    def floats(self) -> list[Floats]:
        """Those of its fields that are."""
        return [part for part in self.fields if isinstance(part, Floats)]

    @cached_property
    def _rows(self) -> list[InRows]:
        """The fields of a message that is `in_rows`."""
        return [part for part in self.fields if isinstance(part, InRows)]

    def room(self, senders: int) -> dict[str, Array]:
        """Arrays `[senders, …]` for the values of several senders, to be used again for every message; not filled."""
        return {part.name: np.empty((senders, *part.shape), part.dtype) for part in self.fields}

    def example(self) -> dict[str, Array]:
        """Valid values to measure messages with, `Field.example` of each."""
        return {part.name: part.example() for part in self.fields}
