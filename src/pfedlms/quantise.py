"""Statistics → thresholds → symbols, and signs as bits.

Both ends compute thresholds from the same few float32 numbers in the same order and precision, so they agree on every
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F


def statistics(sketched: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each layer's sketch: `[clients, Σ m]` → two `[clients, layers]`, taken in
    float64, returned as float32."""
    parts = [part.double() for part in torch.split(sketched, list(sizes), dim=1)]
    means = torch.stack([part.mean(dim=1) for part in parts], dim=1)
    variances = torch.stack([part.var(dim=1, correction=0) for part in parts], dim=1)
    return means.float(), variances.float()


def root_mean_squares(sketched: Tensor, sizes: Sequence[int]) -> Tensor:
    """√(mean of y²) of each layer's sketch: `[clients, Σ m]` → `[clients, layers]`, taken in float64, returned as
    float32."""
    parts = torch.split(sketched.double().square(), list(sizes), dim=1)
    return torch.stack([part.mean(dim=1) for part in parts], dim=1).sqrt().float()


def pack_signs(values: Tensor) -> Tensor:
    """The signs of `[clients, count]` as bits where the values are, uint8 `[clients, ceil(count / 8)]`: 1 for +1, zero
    included; bit i is bit i % 8 of byte i // 8, and bits after the end are 0."""
    bits = values >= 0
    if not values.is_cuda:
        return torch.from_numpy(np.packbits(bits.numpy(), axis=1, bitorder="little"))
    eights = F.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (eights << torch.arange(8, device=values.device, dtype=torch.uint8)).sum(dim=2, dtype=torch.uint8)


def normal_quantiles(thresholds: int) -> NDArray[np.float32]:
    """Υ⁻¹(t / (T + 1)) for t = 1..T, computed in float64 and rounded to float32."""
    return np.array([NormalDist().inv_cdf(t / (thresholds + 1)) for t in range(1, thresholds + 1)], dtype=np.float32)


@lru_cache
def lloyd_max(levels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Centroids `[levels]` and boundaries between them `[levels − 1]` of least mean squared error for a standard
    normal.

    Boundaries lie halfway between centroids, centroids at the mean of their cell, m(a, b) = (φ(a) − φ(b)) / (Υ(b) −
    Υ(a)). Solved by Newton's method in float64, from the quantiles of a normal of variance 3, which are right for many
    levels.
    """
    normal = NormalDist()
    centroids = np.array([sqrt(3) * normal.inv_cdf((i + 0.5) / levels) for i in range(levels)])
    for _ in range(50):
        edges = (centroids[1:] + centroids[:-1]) / 2
        heights = np.array([0.0, *map(normal.pdf, edges), 0.0])
        shares = np.diff([0.0, *map(normal.cdf, edges), 1.0])
        means = (heights[:-1] - heights[1:]) / shares
        # ∂m/∂a = φ(a)(m − a)/share and ∂m/∂b = φ(b)(b − m)/share; each edge moves by half of what its centroids move.
        low = heights[1:-1] * (means[1:] - edges) / shares[1:] / 2
        high = heights[1:-1] * (edges - means[:-1]) / shares[:-1] / 2
        slope = np.eye(levels) - np.diag(low, -1) - np.diag(high, 1)
        slope -= np.diag(np.append(0.0, low)) + np.diag(np.append(high, 0.0))
        step = np.linalg.solve(slope, means - centroids)
        centroids = centroids + step
        if np.abs(step).max() < 1e-13:
            break
    centroids = (centroids - centroids[::-1]) / 2  # exactly symmetric, whatever rounding did
    return centroids.astype(np.float32), ((centroids[1:] + centroids[:-1]) / 2).astype(np.float32)


def thresholds_of(
    mean: NDArray[np.float32], deviation: NDArray[np.float32], quantiles: NDArray[np.float32]
) -> NDArray[np.float32]:
    """τ_t = μ̄ + σ̄ Υ⁻¹(t / (T + 1)): `[layers]`, `[layers]`, `[T]` → `[layers, T]`, in float64 from float32 values,
    rounded to float32."""
    product = deviation.astype(np.float64)[:, None] * quantiles.astype(np.float64)[None, :]
    return (mean.astype(np.float64)[:, None] + product).astype(np.float32)


def symbols_of(sketched: Tensor, thresholds: Tensor, sizes: Sequence[int]) -> Tensor:
    """q(i) = #{t : y(i) ≥ τ_t}: `[clients, Σ m]` and `[layers, T]` → uint8 `[clients, Σ m]`."""
    parts = torch.split(sketched, list(sizes), dim=1)
    bins = [
        torch.bucketize(part.contiguous(), own, right=True)
        for part, own in zip(parts, thresholds.contiguous(), strict=True)
    ]
    return torch.cat(bins, dim=1).to(torch.uint8)


def narrowest_interval(quantiles: NDArray[np.float32]) -> float:
    """Smallest distance of two neighbouring thresholds in units of σ̄; infinite for one threshold."""
    return float(np.diff(quantiles.astype(np.float64)).min()) if len(quantiles) > 1 else float("inf")
