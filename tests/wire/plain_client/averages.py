"""Section 11 of the page: FedAvg and STC."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plain_client.fields import Field, Floats, Positions, Signs
from plain_client.numbers import f32


def average(samples: Sequence[int], models: Sequence[Sequence[float]]) -> list[float]:
    total, result = sum(samples), []
    for values in zip(*models, strict=True):
        weighted = 0.0
        for n, x in zip(samples, values, strict=True):
            weighted = weighted + n * x
        result.append(f32(weighted / total))
    return result


def stc_fields(count: int, dim: int) -> list[Field]:
    return [Floats(1, minimum=0.0), Signs(count), Positions(count, dim)]


def ternary(x: Sequence[float], count: int) -> list:
    """Magnitude, signs and positions: the values of `stc_fields`."""
    positions = sorted(sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:count])
    magnitude = f32(math.fsum(abs(x[i]) for i in positions) / count)
    return [[magnitude], [1.0 if x[i] >= 0 else -1.0 for i in positions], positions]


def add_sparse(x: Sequence[float], factor: float, values: Sequence) -> list[float]:
    """x plus `factor` times a sparse message; factor is 1 or −1."""
    (magnitude,), signs, positions = values
    result = list(x)
    for sign, i in zip(signs, positions, strict=True):
        result[i] = f32(result[i] + factor * sign * magnitude)
    return result


def server_input(samples: Sequence[int], messages: Sequence[Sequence], residual: Sequence[float]) -> list[float]:
    """The server's x: the weighted mean of the messages plus its residual."""
    sums = [0.0] * len(residual)
    for n, ((magnitude,), signs, positions) in zip(samples, messages, strict=True):
        for sign, i in zip(signs, positions, strict=True):
            sums[i] = sums[i] + n * (sign * magnitude)
    return [f32(s / sum(samples) + e) for s, e in zip(sums, residual, strict=True)]
