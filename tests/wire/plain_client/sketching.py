"""Section 4 of the page: the sketch and its transpose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from plain_client.numbers import Table, f32, padded, row, signs, stream


def transform(values: Iterable[float]) -> list[float]:
    x = list(values)
    h = 1
    while h < len(x):
        for i in range(len(x)):
            if (i // h) % 2 == 0:
                a, b = x[i], x[i + h]
                x[i], x[i + h] = f32(a + b), f32(a - b)
        h *= 2
    return x


def kept_rows(seed: int, epoch: int, index: int, size: int, m: int) -> list[int]:
    key, bits = stream(seed, "sketch-rows", epoch, index), padded(size).bit_length() - 1
    return [row(key, bits, j) for j in range(m)]


def sketch(model: Sequence[float], table: Table, sizes: Sequence[int], seed: int, epoch: int) -> list[list[float]]:
    """One list of entries for each layer; `sizes` has their numbers m."""
    layers = []
    for index, ((offset, size), m) in enumerate(zip(table, sizes, strict=True)):
        flips = signs(stream(seed, "sketch-signs", epoch, index), size)
        x = [model[offset + i] * flips[i] for i in range(size)] + [0.0] * (padded(size) - size)
        x, scale = transform(x), f32(1 / math.sqrt(m))
        layers.append([f32(x[i] * scale) for i in kept_rows(seed, epoch, index, size, m)])
    return layers


def transpose(entries: Sequence[float], seed: int, epoch: int, index: int, size: int) -> list[float]:
    """The transpose of the sketch of one layer, without the scale: entries to their rows, transform, signs."""
    flips = signs(stream(seed, "sketch-signs", epoch, index), size)
    x = [0.0] * padded(size)
    for i, entry in zip(kept_rows(seed, epoch, index, size, len(entries)), entries, strict=True):
        x[i] = entry
    return [value * flip for value, flip in zip(transform(x), flips, strict=False)]
