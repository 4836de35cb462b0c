"""Lloyd–Max boundaries, which both ends round to the same float32 numbers: the package against 40 digits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import numpy as np
import plain_client as plain
import pytest

from pfedlms.quantise import lloyd_max, lloyd_max_in_float64

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
LEVELS = range(2, 257)


def to_a_midpoint(x: Decimal) -> Decimal:
    """From a positive number to the nearest number that lies halfway between two float32 numbers."""
    (bits,) = struct.unpack(">I", struct.pack(">f", float(x)))
    near = [Decimal(struct.unpack(">f", struct.pack(">I", bits + step))[0]) for step in (-1, 0, 1)]
    return min(abs((near[0] + near[1]) / 2 - x), abs((near[1] + near[2]) / 2 - x))


def positive_boundaries() -> Iterator[Decimal]:
    for levels in LEVELS:
        yield from (bound for bound in plain.lloyd_max_boundaries(levels) if bound > 0)


def test_boundaries_and_centroids_before_they_are_rounded() -> None:
    worst = Decimal(0)
    for levels in LEVELS:
        exact = plain.lloyd_max_boundaries(levels)
        centroids, edges = lloyd_max_in_float64(levels)
        worst = max(worst, *(abs(Decimal(x) - y) for x, y in zip(edges.tolist(), exact, strict=True)))
        # By hand from the definition: a boundary lies halfway between its centroids.
        halfway = (centroids[1:] + centroids[:-1]) / 2
        worst = max(worst, *(abs(Decimal(x) - y) for x, y in zip(halfway.tolist(), exact, strict=True)))
    assert worst < Decimal("1e-13")


def test_both_ends_round_to_the_same_numbers() -> None:
    for levels in LEVELS:
        assert plain.quantiles(levels - 1, "lloyd-max") == lloyd_max(levels)[1].tolist()


def test_the_page_says_how_exact_they_must_be() -> None:
    """What it says of the numbers that are hard to round."""
    distances = sorted(map(to_a_midpoint, positive_boundaries()))
    assert Decimal("4.4e-13") < distances[0] < Decimal("4.5e-13")
    assert 2 * sum(distance < Decimal("1e-10") for distance in distances) == 174  # each has its like below zero
    words = " ".join(PAGE.split())
    assert "an error below 4 · 10⁻¹³" in words
    assert "174 of them lie within 10⁻¹⁰" in words
    assert "T = 198 has one at 4.4 · 10⁻¹³" in words
    assert min(to_a_midpoint(x) for x in plain.lloyd_max_boundaries(199) if x > 0) == distances[0]


@pytest.mark.parametrize("levels", [2, 3, 4, 5])
def test_the_definition_by_simple_sums(levels: int) -> None:
    """The conditions themselves, with the normal cut into 400,000 strips: no Newton's method, no error function."""
    bounds = np.array([-12.0, *map(float, plain.lloyd_max_boundaries(levels)), 12.0])
    means = []
    for a, b in pairwise(bounds):
        x = a + (np.arange(400_000) + 0.5) * (b - a) / 400_000
        density = np.exp(-x * x / 2)
        means.append((x * density).sum() / density.sum())
    assert np.allclose((np.array(means[1:]) + means[:-1]) / 2, bounds[1:-1], atol=1e-9, rtol=0)
