"""Numbers as `vectors.json` writes them: the hex digits of their bits, most significant first."""

from __future__ import annotations

import struct
from collections.abc import Iterable


def f32(bits: str) -> float:
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def f32s(values: Iterable[str]) -> list[float]:
    return [f32(bits) for bits in values]


def bits32(values: Iterable[float]) -> list[str]:
    return [struct.pack(">f", value).hex() for value in values]


def f64(bits: str) -> float:
    return struct.unpack(">d", bytes.fromhex(bits))[0]


def signs(text: str) -> list[float]:
    return [1.0 if sign == "+" else -1.0 for sign in text]
