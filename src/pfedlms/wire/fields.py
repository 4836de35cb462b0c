"""Messages and their fields. (Fields of symbols and bits are in `codec`, fields of positions in `golomb`.)

A method declares the fields of its messages. Both ends derive the length of a field from this declaration, or from the
field's own bits, so a payload is the concatenation of its fields. Values are NumPy arrays without a clients axis;
numbers are little endian. A field is encoded into an existing buffer (a part of a frame) and decoded into an existing
array (a sender's row of `Message.empty_values`), without extra copies.
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
from pfedlms.checks import IS_MASKED, check_integer
from pfedlms.errors import DecodeError, OversizedError, TruncatedError
from pfedlms.wire.kernels import check_finite

Array = NDArray[Any]
Values = Mapping[str, Array]

_FEW = 64  # for so many numbers a check in NumPy is faster than the call of a kernel


class Field(ABC):
    """One named part of a message."""

    name: str
    dtype: ClassVar[type[np.generic]] = np.float32
    shape: tuple[int, ...]
    """Shape of one sender's value; set by the constructors of the kinds of fields."""
    minimum: float = -np.inf
    """The least number that a value may contain."""

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
    def read(self, data: memoryview, known: Values, out: Array) -> None:
        """Decode `data`, which has `encoded_size` bytes, into `out`; raise DecodeError if no valid value has these
        bytes."""

    def example(self) -> Array:
        """A valid value, to measure the size of messages: the largest, unless a kind of field overrides this."""
        return np.full(self.shape, max(1, self.minimum), self.dtype)

    def check_value(self, values: Values, *senders: int) -> Array:
        """This field's value, or those of `senders` senders, as a contiguous array of the right type; raise ValueError
        if the shape is wrong, or if whole numbers or truth values of another type would become others."""
        if isinstance(values[self.name], np.ma.MaskedArray):
            raise ValueError(f"field {self.name!r}: {IS_MASKED}")
        given = np.asarray(values[self.name])
        value = np.ascontiguousarray(given if given.dtype == self.dtype else self._convert(given))
        expected = (*senders, *self.shape)
        if value.shape != expected:
            raise ValueError(f"field {self.name!r}: got shape {list(value.shape)}, expected {list(expected)}")
        return value

    def _convert(self, given: Array) -> Array:
        """Numbers of another type in this field's type. Floats are rounded; other numbers must stay the same."""
        if given.dtype.kind not in "biuf":
            raise ValueError(f"field {self.name!r}: got {given.dtype}, expected numbers, {self.dtype.__name__}")
        with np.errstate(invalid="ignore"):  # of NaN as a whole number, which is refused
            value = given.astype(self.dtype)
        if self.dtype is not np.float32 and (wrong := value != given).any():
            raise ValueError(
                f"field {self.name!r}: got {given[wrong][0]}, which is no {self.dtype.__name__}; round and limit "
                "values before they are sent"
            )
        return value

    def _check_count(self, name: str) -> int:
        """The number of entries that a field is declared with."""
        return check_integer(f"field {self.name!r}: {name}", getattr(self, name), 0)


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
    def read_rows(self, data: Array, out: Array | None = None) -> Array | None:
        """The values of the rows of `data`, or None if one row is not valid. The result may be a view of `data`, or
        `out`."""

    def refusal(self, row: Array) -> str:
        """Why `read_rows` refuses this row."""
        raise NotImplementedError  # for fields that accept all bytes

    def write(self, values: Values, out: memoryview) -> None:
        value, row = self.check_value(values), np.frombuffer(out, np.uint8)
        if row.size != self.size(values):  # kernels do not check bounds
            raise ValueError(f"field {self.name!r}: got {row.size} bytes to write to, expected {self.size(values)}")
        self.write_rows({self.name: value[None]}, row[None])

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        row = np.frombuffer(data, np.uint8)
        if row.size != self.size(known):
            raise DecodeError(f"field {self.name!r}: got {row.size} bytes, expected {self.size(known)}")
        out_rows = out[None]
        decoded = self.read_rows(row[None], out_rows)
        if decoded is None:
            raise DecodeError(self.refusal(row))
        if decoded is not out_rows:
            out[:] = decoded[0]


@dataclass(frozen=True)
class Floats(RowField):
    """A float32 vector of finite numbers, none below `minimum`. Value: float32 `[count]`.

    The receiver checks the numbers. The sender does not: it writes NaN, infinities and numbers below `minimum`, too.
    """

    name: str
    count: int
    minimum: float = -np.inf

    def __post_init__(self) -> None:
        vars(self).update(shape=(self._check_count("count"),))

    def write(self, values: Values, out: memoryview) -> None:
        target, value = np.frombuffer(out, dtype="<f4"), self.check_value(values)
        run_kernel(lambda first, last: np.copyto(target[first:last], value[first:last]), self.count, 1)

    def write_rows(self, values: Values, out: Array) -> None:
        rows = self.check_value(values, len(out)).astype("<f4", copy=False).view(np.uint8)
        run_kernel(lambda first, last: np.copyto(out[first:last], rows[first:last]), len(out), self.count)

    def read_rows(self, data: Array, out: Array | None = None) -> Array | None:
        # The kernel needs numbers whose addresses are multiples of 4.
        aligned = data.ctypes.data % 4 == data.strides[0] % 4 == 0
        rows = (data if aligned else data.copy()).view("<f4")
        if self.count <= _FEW:
            return rows if bool((np.isfinite(rows) & (rows >= np.float32(self.minimum))).all()) else None
        refused, minimum, read_only = np.zeros(1, np.uint8), float(self.minimum), rows.view()
        read_only.flags.writeable = False  # numba compiles a kernel for read-only inputs and again for others
        for row in read_only:
            run_kernel(check_finite, self.count, 1, row, minimum, refused)
        return None if refused[0] else rows

    def refusal(self, row: Array) -> str:
        numbers = row.view("<f4")
        at = int(np.argmin(np.isfinite(numbers) & (numbers >= np.float32(self.minimum))))
        return (
            f"field {self.name!r}: got {numbers[at]} at position {at}, expected a finite number of at least "
            f"{self.minimum}"
        )


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

    def __post_init__(self) -> None:
        vars(self).update(shape=(self._check_count("count"), self._check_count("width")))

    def size(self, values: Values) -> int:
        return 4 * self.width * int(np.count_nonzero(values[self.mask]))

    def write(self, values: Values, out: memoryview) -> None:
        sent = np.asarray(values[self.mask], dtype=bool)
        np.frombuffer(out, dtype="<f4").reshape(-1, self.width)[:] = self.check_value(values)[sent]

    def read(self, data: memoryview, known: Values, out: Array) -> None:
        rows = np.empty(len(data) // 4, dtype=np.float32)
        Floats(self.name, len(rows)).read(data, known, rows)
        out[:] = 0
        out[known[self.mask]] = rows.reshape(-1, self.width)


@dataclass(frozen=True)
class MaskedBytes(RowField):
    """`count` bytes if the field `mask`, an earlier Mask of count 1, is true; else nothing is sent, and zeros are read.
    Value: uint8 `[count]`."""

    name: str
    mask: str
    count: int
    dtype: ClassVar[type[np.generic]] = np.uint8

    def __post_init__(self) -> None:
        vars(self).update(shape=(self._check_count("count"),))

    def size(self, values: Values) -> int:
        return self.count if values[self.mask][0] else 0

    def rows_size(self, values: Values) -> int | None:
        sent = values[self.mask][:, 0]
        return self.count if sent.all() else None if sent.any() else 0

    def write_rows(self, values: Values, out: Array) -> None:
        out[:] = self.check_value(values, len(out))[:, : out.shape[1]]

    def read_rows(self, data: Array, out: Array | None = None) -> Array | None:
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
        earlier: dict[str, Field] = {}
        for part in self.fields:
            if isinstance(part, MaskedRows | MaskedBytes):
                mask, count = earlier.get(part.mask), part.count if isinstance(part, MaskedRows) else 1
                if mask is None or mask.dtype is not np.bool_ or mask.shape != (count,):
                    raise ValueError(
                        f"field {part.name!r}: got the mask {part.mask!r}, expected the name of an earlier Mask of "
                        f"count {count}; it says which parts are sent"
                    )
            earlier[part.name] = part

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

    def read(self, payload: memoryview, into: Values | None = None) -> dict[str, Array]:
        """Decode the values of all fields into the arrays of `into`, or into new ones. The payload must end where the
        last field ends."""
        known: dict[str, Array] = {}
        at, length = 0, len(payload)
        for part in self.fields:
            end = at + part.encoded_size(payload[at:], known)
            if length < end:
                raise TruncatedError(f"payload: got {length} bytes, expected at least {end} up to field {part.name!r}")
            out = np.empty(part.shape, part.dtype) if into is None else into[part.name]
            if (out.shape, out.dtype) != (part.shape, part.dtype) or not out.flags.carray:
                raise ValueError(
                    f"array for field {part.name!r}: got {out.dtype} {list(out.shape)}, expected {part.dtype.__name__} "
                    f"{list(part.shape)}, contiguous and writable, as a row of `Message.empty_values`"
                )
            part.read(payload[at:end], known, out)
            known[part.name] = out
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

    def read_rows(self, payloads: Array) -> dict[str, Array] | None:
        """Decode every row of `payloads`, uint8 `[senders, size]`, as `read` does; None if one row is not valid. Values
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
        """Uninitialised arrays `[senders, …]` to decode the values of several senders into, again and again."""
        return {part.name: np.empty((senders, *part.shape), part.dtype) for part in self.fields}

    def example(self) -> dict[str, Array]:
        """Valid values of all fields, to measure the size of messages."""
        return {part.name: part.example() for part in self.fields}
