"""Messages and their fields. (Fields of symbols and bits are in `codec`, fields of positions in `golomb`.)

A method declares the fields of its messages. Both ends derive the length of a field from this declaration, or from the
field's own bits, so a payload is the concatenation of its fields. Values are NumPy arrays without a clients axis;
numbers are little endian. A field is encoded into an existing buffer, a part of a frame.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pfedlms.backend import run_kernel
from pfedlms.checks import as_array
from pfedlms.errors import DecodeError, OversizedError, TruncatedError

Array = NDArray[Any]
Values = Mapping[str, Array]


class Field(ABC):
    """One named part of a message."""

    name: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.float32
    minimum: float = -np.inf
    """The least number that a value may contain."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sender's value."""
        return (self.count,)

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes the field can take; fields of fixed size always take this many."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def size(self, values: Values) -> int:
        """Bytes of the encoded field; `values` also has the fields before it."""
        return self.max_bytes

    def encoded_size(self, data: memoryview, known: Values) -> int:
        """Bytes of the encoded field with which `data` begins; `known` has the fields before it. The result is larger
        than `data` if bytes are missing."""
        return self.size(known)

    @abstractmethod
    def write(self, values: Values, out: memoryview) -> None:
        """Encode `values[self.name]` as the `size(values)` bytes of `out`."""

    @abstractmethod
    def read(self, data: memoryview, known: Values) -> Array:
        """Decode `data`, which has `encoded_size` bytes; raise DecodeError if no valid value has these bytes. The value
        may be a view of them."""

    def example(self) -> Array:
        """A valid value, to measure the size of messages: the largest, unless a kind of field overrides this."""
        return np.full(self.shape, max(1, self.minimum), self.dtype)

    def check_value(self, values: Values, *senders: int) -> Array:
        """This field's value, or those of `senders` senders, as a contiguous array of the right type; raise ValueError
        if the shape is wrong, or if whole numbers or truth values of another type would become others."""
        given = values[self.name]
        given = as_array(f"field {self.name!r}", given) if isinstance(given, np.ndarray) else np.asarray(given)
        with np.errstate(invalid="ignore"):  # of NaN as a whole number, which is refused
            value: Array = np.ascontiguousarray(given, dtype=self.dtype)
        # Floats are rounded; other numbers must stay the same.
        if given.dtype != self.dtype and self.dtype is not np.float32 and (wrong := value != given).any():
            raise ValueError(
                f"field {self.name!r}: got {given[wrong][0]}, which is no {self.dtype.__name__}; round and limit "
                "values before they are sent"
            )
        expected = (*senders, *self.shape)
        if value.shape != expected:
            raise ValueError(f"field {self.name!r}: got shape {list(value.shape)}, expected {list(expected)}")
        return value


class RowField(Field):
    """A field that is encoded and decoded for many senders at once, a row for each; all rows have the same size.
    `write` and `read` take a single row."""

    def rows_size(self, values: Values) -> int | None:
        """Bytes of the encoded field in every row; `values` also has the fields before it. None if rows differ."""
        return self.max_bytes

    @abstractmethod
    def write_rows(self, values: Values, out: Array) -> None:
        """Encode `values[self.name]: [senders, …]` as the rows of `out`, uint8 `[senders, size]`."""

    @abstractmethod
    def read_rows(self, data: Array) -> Array:
        """The values of the rows of `data`, which may be a view of them; raise DecodeError if one row is not valid."""

    def write(self, values: Values, out: memoryview) -> None:
        value, row = self.check_value(values), np.frombuffer(out, np.uint8)
        if row.size != self.size(values):  # kernels do not check bounds
            raise ValueError(f"field {self.name!r}: got {row.size} bytes to write to, expected {self.size(values)}")
        self.write_rows({self.name: value[None]}, row[None])

    def read(self, data: memoryview, known: Values) -> Array:
        row = np.frombuffer(data, np.uint8)
        if row.size != self.size(known):
            raise DecodeError(f"field {self.name!r}: got {row.size} bytes, expected {self.size(known)}")
        return np.asarray(self.read_rows(row[None])[0])


@dataclass(frozen=True)
class Floats(RowField):
    """A float32 vector of finite numbers, none below `minimum`. Value: float32 `[count]`.

    The receiver checks the numbers. The sender does not: it writes NaN, infinities and numbers below `minimum`, too.
    """

    name: str
    count: int
    minimum: float = -np.inf

    def write(self, values: Values, out: memoryview) -> None:
        target, value = np.frombuffer(out, dtype="<f4"), self.check_value(values)
        run_kernel(lambda first, last: np.copyto(target[first:last], value[first:last]), self.count, 1)

    def write_rows(self, values: Values, out: Array) -> None:
        rows = self.check_value(values, len(out)).astype("<f4", copy=False).view(np.uint8)
        run_kernel(lambda first, last: np.copyto(out[first:last], rows[first:last]), len(out), self.count)

    def read_rows(self, data: Array) -> Array:
        aligned = data.ctypes.data % 4 == data.strides[0] % 4 == 0
        rows = (data if aligned else data.copy()).view("<f4")
        lowest, highest = rows.min(initial=np.inf), rows.max(initial=-np.inf)  # NaN if one of the numbers is
        if not (lowest > -np.inf and lowest >= np.float32(self.minimum) and highest < np.inf):
            at = tuple(np.argwhere(~(np.isfinite(rows) & (rows >= np.float32(self.minimum))))[0])
            raise DecodeError(
                f"field {self.name!r}: got {rows[at]} at position {at[-1]}, expected a finite number of at least "
                f"{self.minimum}"
            )
        return rows


def Scalar(name: str, minimum: float = -np.inf) -> Floats:
    """A single float32. Value: float32 `[1]`."""
    return Floats(name, 1, minimum)


@dataclass(frozen=True)
class MaskedRows(Field):
    """Rows of float32 for which the field `mask`, an earlier Mask, is true; the others are not sent and are read as
    zero. Value: float32 `[count, width]`."""

    name: str
    mask: str
    count: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, self.width

    def size(self, values: Values) -> int:
        return 4 * self.width * int(np.count_nonzero(values[self.mask]))

    def write(self, values: Values, out: memoryview) -> None:
        sent = np.asarray(values[self.mask], dtype=bool)
        np.frombuffer(out, dtype="<f4").reshape(-1, self.width)[:] = self.check_value(values)[sent]

    def read(self, data: memoryview, known: Values) -> Array:
        out = np.zeros(self.shape, np.float32)
        out[known[self.mask]] = Floats(self.name, len(data) // 4).read(data, known).reshape(-1, self.width)
        return out


@dataclass(frozen=True)
class MaskedBytes(RowField):
    """`count` bytes if the field `mask`, an earlier Mask of count 1, is true; else nothing is sent, and zeros are read.
    Value: uint8 `[count]`."""

    name: str
    mask: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.uint8

    def size(self, values: Values) -> int:
        return self.count if values[self.mask][0] else 0

    def rows_size(self, values: Values) -> int | None:
        sent = values[self.mask][:, 0]
        return self.count if sent.all() else None if sent.any() else 0

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = self.check_value(values, len(out))[:, : out.shape[1]]

    def read_rows(self, data: Array) -> Array:
        return data if data.shape[1] else np.zeros((len(data), self.count), np.uint8)


@dataclass(frozen=True)
class Message:
    """What one end of an exchange sends: the number of its kind, and its fields in order."""

    kind: int
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.fields]
        if len(set(names)) < len(names):
            raise ValueError(f"fields: got the names {names}, expected different ones; values are known by their names")

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes a payload can have."""
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

    def read(self, payload: memoryview) -> dict[str, Array]:
        """Decode the values of all fields, which may be views of the payload. It must end where the last field ends."""
        known: dict[str, Array] = {}
        at, length = 0, len(payload)
        for part in self.fields:
            end = at + part.encoded_size(payload[at:], known)
            if length < end:
                raise TruncatedError(f"payload: got {length} bytes, expected at least {end} up to field {part.name!r}")
            known[part.name] = part.read(payload[at:end], known)
            at = end
        if at != length:
            raise OversizedError(f"payload: got {length} bytes, expected {at}")
        return known

    def rows_size(self, values: Values) -> int | None:
        """Bytes of the payload in every row of `values: [senders, …]`; None if rows differ, or if a field is no
        `RowField`, so that messages must be encoded one by one."""
        sizes = [part.rows_size(values) if isinstance(part, RowField) else None for part in self.fields]
        return None if None in sizes else sum(filter(None, sizes))

    def write_rows(self, values: Values, out: Array) -> None:
        """`write` of every row of `values` into the rows of `out`, uint8 `[senders, rows_size(values)]`."""
        at = 0
        for part in self._rows:
            end = at + (part.rows_size(values) or 0)
            part.write_rows(values, out[:, at:end])
            at = end

    def read_rows(self, payloads: Array) -> dict[str, Array]:
        """Decode every row of `payloads`, uint8 `[senders, size]`, as `read` does. Values may be views of them. Raise
        DecodeError if one row is not valid."""
        known: dict[str, Array] = {}
        at = 0
        for part in self._rows:
            size = part.rows_size(known)
            if size is None or payloads.shape[1] < at + size:
                raise DecodeError("payloads: got rows of different sizes, or rows that are too short")
            known[part.name] = part.read_rows(payloads[:, at : at + size])
            at += size
        if at != payloads.shape[1]:
            raise DecodeError(f"payloads: got {payloads.shape[1]} bytes, expected {at}")
        return known

    @cached_property
    def only_floats(self) -> bool:
        """Whether all fields are `Floats` without a minimum, on a machine that stores numbers as messages do."""
        plain = len(self.floats) == len(self.fields) and all(part.minimum == -np.inf for part in self.floats)
        return sys.byteorder == "little" and plain

    @cached_property
    def floats(self) -> list[Floats]:
        """The fields that are `Floats`."""
        return [part for part in self.fields if isinstance(part, Floats)]

    @cached_property
    def _rows(self) -> list[RowField]:
        """The fields that are `RowField`s."""
        return [part for part in self.fields if isinstance(part, RowField)]

    def empty_values(self, senders: int) -> dict[str, Array]:
        """Uninitialised arrays `[senders, …]` for the values of several senders."""
        return {part.name: np.empty((senders, *part.shape), part.dtype) for part in self.fields}

    def example(self) -> dict[str, Array]:
        """Valid values of all fields, to measure the size of messages."""
        return {part.name: part.example() for part in self.fields}
