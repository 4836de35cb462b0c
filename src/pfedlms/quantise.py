"""Statistics → thresholds → symbols, and signs as bits.

Both ends compute thresholds from the same few float32 numbers in the same order and precision, so they agree on every
bit. `statistics`, `thresholds_of` and `symbols_of` take tensors or arrays, of clients or of one, and answer in kind.
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

from pfedlms.checks import Array, Values, array_of, in_kind, tensor_of


def statistics(sketched: Values, sizes: Sequence[int]) -> tuple[Values, Values]:
    """Mean and population variance of each layer's sketch: `[clients, Σ m]` → two `[clients, layers]`, taken in
    float64, returned as float32."""
    parts = [part.double() for part in _parts(sketched, sizes)]
    means = torch.stack([part.mean(dim=1) for part in parts], dim=1)
    variances = torch.stack([part.var(dim=1, correction=0) for part in parts], dim=1)
    return in_kind(sketched, means.float()), in_kind(sketched, variances.float())


def _parts(sketched: Tensor | Array, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Every layer's part of sketches `[clients, Σ m]`, or of one."""
    rows = tensor_of("sketched", sketched)
    if rows.ndim not in (1, 2) or rows.shape[-1] != sum(sizes):
        raise ValueError(
            f"sketched: got shape {tuple(rows.shape)}, expected [clients, {sum(sizes)}] or [{sum(sizes)}]; pass the "
            "sizes of its own sketch, sketch.sizes"
        )
    return torch.split(rows if rows.ndim == 2 else rows[None], list(sizes), dim=1)


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


def thresholds_of(mean: Values, deviation: Values, quantiles: NDArray[np.float32]) -> Values:
    """τ_t = μ̄ + σ̄ Υ⁻¹(t / (T + 1)): `[layers]`, `[layers]`, `[T]` → `[layers, T]`, in float64 from float32 values,
    rounded to float32."""
    mu, sigma = (array_of(name, given).astype(np.float64) for name, given in (("mean", mean), ("deviation", deviation)))
    if mu.ndim != 1 or mu.shape != sigma.shape:
        raise ValueError(
            f"mean, deviation: got shapes {mu.shape} and {sigma.shape}, expected [layers] of both; pool_statistics "
            "gives both"
        )
    tau = (mu[:, None] + sigma[:, None] * quantiles.astype(np.float64)[None, :]).astype(np.float32)
    return torch.from_numpy(tau).to(mean.device) if isinstance(mean, Tensor) else tau


def symbols_of(sketched: Values, thresholds: Tensor | Array, sizes: Sequence[int]) -> Values:
    """q(i) = #{t : y(i) ≥ τ_t}: `[clients, Σ m]` and `[layers, T]`, which rise, → uint8 `[clients, Σ m]`.

    >>> symbols_of(np.float32([-2, 0, 2]), np.float32([[-1, 0, 1]]), sizes=[3])
    array([0, 2, 3], dtype=uint8)
    """
    parts = _parts(sketched, sizes)
    tau = tensor_of("thresholds", thresholds, parts[0].device)
    if tau.ndim != 2 or len(tau) != len(parts):
        raise ValueError(
            f"thresholds: got shape {tuple(tau.shape)}, expected [{len(parts)}, T], a row for every layer; "
            "thresholds_of gives them"
        )
    bins = [
        torch.bucketize(part.contiguous(), own, right=True) for part, own in zip(parts, tau.contiguous(), strict=True)
    ]
    return in_kind(sketched, torch.cat(bins, dim=1).to(torch.uint8))


def narrowest_interval(quantiles: NDArray[np.float32]) -> float:
    """Smallest distance of two neighbouring thresholds in units of σ̄; infinite for one threshold."""
    return float(np.diff(quantiles.astype(np.float64)).min()) if len(quantiles) > 1 else float("inf")
