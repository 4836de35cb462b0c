"""Sections 6 and 7 of the page: fields, positions among them, and payloads.

Each field has `largest` and `size(earlier)` in bytes, `write(value, earlier)` and `read(data, earlier)`; `earlier` are
the values of the fields before it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from plain_client.packing import Refused, pack, packed_size, unpack


@dataclass(frozen=True)
class Symbols:
    segments: tuple[int, ...]
    levels: int

    @property
    def largest(self) -> int:
        return sum(packed_size(count, self.levels) for count in self.segments)

    def size(self, earlier: list) -> int:
        return self.largest

    def write(self, value: Sequence[int], earlier: list) -> bytes:
        parts, at = [], 0
        for count in self.segments:
            parts.append(pack(value[at : at + count], self.levels))
            at += count
        return b"".join(parts)

    def read(self, data: bytes, earlier: list) -> list[int]:
        symbols, at = [], 0
        for count in self.segments:
            length = packed_size(count, self.levels)
            symbols += unpack(data[at : at + length], count, self.levels)
            at += length
        return symbols


@dataclass(frozen=True)
class Floats:
    count: int
    minimum: float = -math.inf

    @property
    def largest(self) -> int:
        return 4 * self.count

    def size(self, earlier: list) -> int:
        return self.largest

    def write(self, value: Sequence[float], earlier: list) -> bytes:
        return struct.pack(f"<{self.count}f", *value)

    def read(self, data: bytes, earlier: list) -> list[float]:
        values = list(struct.unpack(f"<{self.count}f", data))
        if not all(math.isfinite(x) and x >= self.minimum for x in values):
            raise Refused("decode")
        return values


@dataclass(frozen=True)
class Mask:
    count: int

    @property
    def largest(self) -> int:
        return (self.count + 7) // 8

    def size(self, earlier: list) -> int:
        return self.largest

    def write(self, value: Sequence[int], earlier: list) -> bytes:
        return pack(value, 2)

    def read(self, data: bytes, earlier: list) -> list[int]:
        return unpack(data, self.count, 2)


@dataclass(frozen=True)
class Signs(Mask):
    def write(self, value: Sequence[float], earlier: list) -> bytes:
        return pack([int(x >= 0) for x in value], 2)

    def read(self, data: bytes, earlier: list) -> list[float]:
        return [1.0 if bit else -1.0 for bit in unpack(data, self.count, 2)]


@dataclass(frozen=True)
class MaskedRows:
    mask: int  # position of the mask among the fields
    count: int
    width: int

    @property
    def largest(self) -> int:
        return 4 * self.count * self.width

    def size(self, earlier: list) -> int:
        return 4 * self.width * sum(earlier[self.mask])

    def write(self, value: Sequence[Sequence[float]], earlier: list) -> bytes:
        return b"".join(
            Floats(self.width).write(r, earlier) for r, bit in zip(value, earlier[self.mask], strict=True) if bit
        )

    def read(self, data: bytes, earlier: list) -> list[list[float]]:
        sent = Floats(self.width * sum(earlier[self.mask])).read(data, earlier)
        rows = []
        for bit in earlier[self.mask]:
            rows.append(sent[: self.width] if bit else [0.0] * self.width)
            sent = sent[self.width :] if bit else sent
        return rows


@dataclass(frozen=True)
class Positions:
    count: int
    places: int

    @property
    def bits(self) -> int:
        x, b = (self.places - self.count) / self.places, 0
        while x >= 0.6180339887498949:
            x, b = x * x, b + 1
        return b

    @property
    def largest(self) -> int:
        return (self.count * (self.bits + 1) + (self.places - self.count) // 2**self.bits + 7) // 8

    def write(self, value: Sequence[int], earlier: list) -> bytes:
        stream, at, before = 0, 0, -1
        for position in value:
            ones, rest = divmod(position - before - 1, 2**self.bits)
            stream |= ((1 << ones) - 1 | rest << ones + 1) << at
            at += ones + 1 + self.bits
            before = position
        return stream.to_bytes((at + 7) // 8, "little")

    def codes(self, data: bytes) -> tuple[list[int], int]:
        """The gaps at the beginning of `data`, and the bits they take."""
        stream, at, gaps = int.from_bytes(data, "little"), 0, []
        for _ in range(self.count):
            ones = 0
            while stream >> at + ones & 1:
                ones += 1
            rest = (stream >> at + ones + 1) % 2**self.bits
            at += ones + 1 + self.bits
            if at > 8 * len(data):
                raise Refused("truncated")
            gaps.append(ones * 2**self.bits + rest)
        return gaps, at

    def read(self, data: bytes, earlier: list) -> list[int]:
        gaps, end = self.codes(data)
        positions, at = [], -1
        for gap in gaps:
            at += gap + 1
            positions.append(at)
        if at >= self.places or int.from_bytes(data, "little") >> end:
            raise Refused("decode")
        return positions


@dataclass(frozen=True)
class MaskedBytes:
    mask: int  # position of the mask, which has one bit, among the fields
    count: int

    @property
    def largest(self) -> int:
        return self.count

    def size(self, earlier: list) -> int:
        return self.count * earlier[self.mask][0]

    def write(self, value: bytes, earlier: list) -> bytes:
        return value[: self.size(earlier)]

    def read(self, data: bytes, earlier: list) -> bytes:
        return data or bytes(self.count)


@dataclass(frozen=True)
class Count:
    @property
    def largest(self) -> int:
        return 4

    def size(self, earlier: list) -> int:
        return 4

    def write(self, value: Sequence[int], earlier: list) -> bytes:
        return struct.pack("<I", *value)

    def read(self, data: bytes, earlier: list) -> list[int]:
        return list(struct.unpack("<I", data))


@dataclass(frozen=True)
class Places:
    places: int

    @property
    def largest(self) -> int:
        return 13 + 9 * self.places // 64

    def read_count(self, data: bytes) -> int:
        if len(data) < 4:
            raise Refused("truncated")
        (count,) = struct.unpack("<I", data[:4])
        if count > self.places:
            raise Refused("decode")
        return count

    def encoded_size(self, data: bytes) -> int:
        count = self.read_count(data)
        return 4 + ((Positions(count, self.places).codes(data[4:])[1] + 7) // 8 if count else 0)

    def write(self, value: Sequence[int], earlier: list) -> bytes:
        positions = [i for i, bit in enumerate(value) if bit]
        coded = Positions(len(positions), self.places).write(positions, earlier) if positions else b""
        return struct.pack("<I", len(positions)) + coded

    def read(self, data: bytes, earlier: list) -> list[int]:
        count = self.read_count(data)
        chosen = Positions(count, self.places).read(data[4:], earlier) if count else []
        return [int(i in set(chosen)) for i in range(self.places)]


Field = Symbols | Floats | Mask | MaskedRows | MaskedBytes | Positions | Count | Places


def write_payload(fields: Sequence[Field], values: Sequence) -> bytes:
    return b"".join(field.write(value, list(values)) for field, value in zip(fields, values, strict=True))


def read_payload(fields: Sequence[Field], payload: bytes) -> list:
    earlier, at = [], 0
    for field in fields:
        if isinstance(field, Positions):
            size = (field.codes(payload[at:])[1] + 7) // 8
        else:
            size = field.encoded_size(payload[at:]) if isinstance(field, Places) else field.size(earlier)
        if len(payload) - at < size:
            raise Refused("truncated")
        earlier.append(field.read(payload[at : at + size], earlier))
        at += size
    if at != len(payload):
        raise Refused("oversized")
    return earlier
