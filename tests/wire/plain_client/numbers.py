"""Sections 1 to 3 of the page: float32, the layer table, random numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

WORD = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def f32(value: float) -> float:
    """The nearest float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


# Section 2: the layer table.

Table = Sequence[tuple[int, int]]


def padded(size: int) -> int:
    pad = 1
    while pad < size:
        pad *= 2
    return pad


def sketch_size(size: int, ratio: float) -> int:
    return max(1, math.floor(ratio * padded(size)))


def allocated_sizes(sizes: Sequence[int], ratio: float, allocation: float) -> tuple[int, ...]:
    """m of every layer of `sketchvote` (section 11.1)."""
    if allocation == 1:
        return tuple(sketch_size(size, ratio) for size in sizes)
    pads = [padded(size) for size in sizes]
    powers = [math.pow(pad, allocation) for pad in pads]
    whole = 0.0
    for power in powers:
        whole = whole + power
    shares = [ratio * sum(pads) * power / whole for power in powers]
    return tuple(min(pad, max(1, math.floor(share))) for pad, share in zip(pads, shares, strict=True))


# Section 3: random numbers.


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def fnv1a(text: str) -> int:
    h = 0xCBF29CE484222325
    for byte in text.encode("ascii"):
        h = ((h ^ byte) * 0x100000001B3) & WORD
    return h


def stream(seed: int, purpose: str, *counters: int) -> int:
    k = mix((seed + GAMMA) & WORD)
    for part in (fnv1a(purpose), *counters):
        k = mix(((k ^ part) + GAMMA) & WORD)
    return k


def word(key: int, i: int) -> int:
    return mix((key + (i + 1) * GAMMA) & WORD)


def signs(key: int, count: int) -> list[float]:
    words = [word(key, i) for i in range((count + 63) // 64)]
    return [-1.0 if words[i // 64] >> (i % 64) & 1 else 1.0 for i in range(count)]


def row(key: int, bits: int, i: int) -> int:
    shift = max(1, (bits + 1) // 2)
    x = i
    for j in range(6):
        a, c = word(key, 2 * j) | 1, word(key, 2 * j + 1)
        x = (a * x + c) % (1 << bits)
        x ^= x >> shift
    return x
