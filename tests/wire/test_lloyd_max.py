"""Lloyd–Max boundaries, which both ends round to the same float32 numbers: the package against 40 digits."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import numpy as np
import plain_client as plain
import pytest

from pfedlms.quantise import lloyd_max, lloyd_max_in_float64

LEVELS = range(2, 257)


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
