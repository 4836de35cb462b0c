"""Section 5 of the page: statistics, thresholds, symbols and the vote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal, localcontext
from functools import cache
from itertools import pairwise
from statistics import NormalDist

from plain_client.numbers import f32

PI = Decimal("3.1415926535897932384626433832795028841972")


def statistics(entries: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(entries) / len(entries)
    variance = math.fsum((y - mean) ** 2 for y in entries) / len(entries)
    return f32(mean), f32(variance)


def pool(samples: Sequence[int], means: Sequence[float], variances: Sequence[float]) -> tuple[float, float]:
    """One layer of all clients, in ascending order of ids."""
    total = sum(samples)
    mean = 0.0
    for n, m in zip(samples, means, strict=True):
        mean = mean + n * m
    mean = mean / total
    square = 0.0
    for n, m, s in zip(samples, means, variances, strict=True):
        d = m - mean
        square = square + n * (s + d * d)
    return f32(mean), f32(math.sqrt(square / total))


def pool_medians(samples: Sequence[int], means: Sequence[float], variances: Sequence[float]) -> tuple[float, float]:
    """One layer of all clients, with `pooling = median`."""

    def median(values: Sequence[float]) -> float:
        weight_up_to = {x: sum(n for n, y in zip(samples, values, strict=True) if y <= x) for x in values}
        return min(x for x, weight in weight_up_to.items() if 2 * weight >= sum(samples))

    mean = median(means)
    spreads = [s + (m - mean) * (m - mean) for m, s in zip(means, variances, strict=True)]
    return f32(mean), f32(math.sqrt(median(spreads)))


def quantiles(thresholds: int, spacing: str = "quantile") -> list[float]:
    if spacing == "lloyd-max":
        return [f32(float(bound)) for bound in lloyd_max_boundaries(thresholds + 1)]
    return [f32(NormalDist().inv_cdf(t / (thresholds + 1))) for t in range(1, thresholds + 1)]


@cache
def lloyd_max_boundaries(levels: int) -> list[Decimal]:
    """Boundaries halfway between centroids, centroids at the mean of the normal in their cell; Newton's method with 40
    digits for those above zero, the others by symmetry. The factor 1/sqrt(2π) of φ and Υ cancels and is left out."""
    with localcontext() as context:
        context.prec = 40
        odd = levels % 2
        bounds = [Decimal(1.7 * NormalDist().inv_cdf(t / levels)) for t in range(levels // 2 + 1, levels)]
        step = [Decimal(1)] * len(bounds)
        while bounds and max(map(abs, step)) > Decimal("1e-25"):
            inner = [(-b * b / 2).exp() for b in bounds]
            heights = [Decimal(1), *inner, Decimal(0)]
            areas = [Decimal(0), *(h * area_factor(b) for b, h in zip(bounds, inner, strict=True)), (PI / 2).sqrt()]
            shares = [b - a for a, b in pairwise(areas)]
            means = [(a - b) / share for (a, b), share in zip(pairwise(heights), shares, strict=True)]
            if odd:
                means[0] = Decimal(0)  # of the cell around zero
            low, high = means[:-1], means[1:]
            missing = [(a + c) / 2 - b for a, b, c in zip(low, bounds, high, strict=True)]
            # How the centroids below and above a boundary move with it; the one around zero does not.
            below = [h * (b - m) / s for h, b, m, s in zip(inner, bounds, low, shares[:-1], strict=True)]
            above = [h * (m - b) / s for h, b, m, s in zip(inner, bounds, high, shares[1:], strict=True)]
            if odd:
                below[0] = Decimal(0)
            middle = [1 - (x + y) / 2 for x, y in zip(below, above, strict=True)]
            step = tridiagonal([-x / 2 for x in above[:-1]], middle, [-x / 2 for x in below[1:]], missing)
            bounds = [b + x for b, x in zip(bounds, step, strict=True)]
        return [*(-b for b in reversed(bounds)), *[Decimal(0)] * (1 - odd), *bounds]


def area_factor(x: Decimal) -> Decimal:
    """exp(x² / 2) ∫ exp(−t² / 2) dt from 0 to x = x + x³/3 + x⁵/(3·5) + …"""
    total, term, odd = Decimal(0), x, 1
    while term > Decimal("1e-38"):
        total, odd = total + term, odd + 2
        term = term * x * x / odd
    return total


def tridiagonal(
    lower: Sequence[Decimal], middle: Sequence[Decimal], upper: Sequence[Decimal], right: Sequence[Decimal]
) -> list[Decimal]:
    """The solution of a system of equations with three diagonals, by elimination."""
    pivots, sums = [middle[0]], [right[0]]
    for below, own, above, value in zip(lower, middle[1:], upper, right[1:], strict=True):
        factor = below / pivots[-1]
        pivots.append(own - factor * above)
        sums.append(value - factor * sums[-1])
    found = [sums[-1] / pivots[-1]]
    for pivot, above, value in zip(pivots[-2::-1], reversed(upper), sums[-2::-1], strict=True):
        found.append((value - above * found[-1]) / pivot)
    return found[::-1]


def thresholds_of(mean: float, deviation: float, count: int, spacing: str = "quantile") -> list[float]:
    return [f32(mean + deviation * z) for z in quantiles(count, spacing)]


def symbols_of(entries: Iterable[float], thresholds: Sequence[float]) -> list[int]:
    return [sum(y >= tau for tau in thresholds) for y in entries]


def vote(samples: Sequence[int], ballots: Sequence[Sequence[int]], thresholds: int) -> list[int]:
    total = sum(samples)
    result = []
    for chosen in zip(*ballots, strict=True):
        above = [sum(n for n, q in zip(samples, chosen, strict=True) if q >= t) for t in range(1, thresholds + 1)]
        result.append(sum(a >= total - a for a in above))
    return result
