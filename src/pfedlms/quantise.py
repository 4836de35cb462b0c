"""Statistics → thresholds → symbols, and signs as bits.

Both ends compute thresholds from the same few float32 numbers in the same order and precision, so they agree on every
bit. `statistics`, `thresholds_of` and `symbols_of` take tensors or arrays, of one client or several, and return such.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import erfc, exp, pi, sqrt
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pfedlms.checks import Array, Values, as_array, as_tensor, check_integer, like_input

_MOST_THRESHOLDS = 255  # a symbol is one byte


def statistics(sketched: Values, sizes: Sequence[int]) -> tuple[Values, Values]:
    """Mean and population variance of each layer's sketch: `[clients, Σ m]` → two `[clients, layers]`, taken in
    float64, returned as float32."""
    parts = [part.double() for part in _split_layers(sketched, sizes)]
    means = torch.stack([part.mean(dim=1) for part in parts], dim=1)
    variances = torch.stack([part.var(dim=1, correction=0) for part in parts], dim=1)
    return like_input(sketched, means.float()), like_input(sketched, variances.float())


def _split_layers(sketched: Tensor | Array, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Sketches `[clients, Σ m]`, or one sketch, split into the parts of the layers."""
    rows, counts = as_tensor("sketched", sketched), [check_integer("sizes", size, 1) for size in sizes]
    return torch.split(rows if rows.ndim == 2 else rows[None], counts, dim=1)


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
    """Υ⁻¹(t / (T + 1)) for t = 1..T, T up to 255, computed in float64 and rounded to float32."""
    check_integer("thresholds", thresholds, 1, _MOST_THRESHOLDS, "a symbol is one byte")
    return np.array([NormalDist().inv_cdf(t / (thresholds + 1)) for t in range(1, thresholds + 1)], dtype=np.float32)


def lloyd_max(levels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Centroids `[levels]` and boundaries between them `[levels − 1]` of least mean squared error for a standard
    normal, the nearest float32 numbers; 2 to 256 levels."""
    check_integer("levels", levels, 2, _MOST_THRESHOLDS + 1, "a symbol is one byte")
    centroids, edges = lloyd_max_in_float64(levels)
    return centroids.astype(np.float32), edges.astype(np.float32)


@lru_cache
def lloyd_max_in_float64(levels: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Centroids and boundaries before they are rounded, with errors below 1e-13.

    Boundaries lie halfway between centroids, centroids at the mean of their cell. Solved by Newton's method, from the
    quantiles of a normal of variance 3, which are right for many levels. With many levels an error in a mean comes out
    thousands of times larger, and some boundaries lie within 1e-12 of the middle between two float32 numbers. So means
    are never differences of nearly equal numbers: within [c − h, c + h] the mean lies beside the centre by

        − ∫₀ʰ t sinh(c t) e^(−t²/2) dt  /  ∫₀ʰ cosh(c t) e^(−t²/2) dt

    whose integrands have one sign, and beyond the last boundary a it is φ(a) / Υ(−a).
    """
    nodes, weights = np.polynomial.legendre.leggauss(16)
    edges = np.array([sqrt(3) * NormalDist().inv_cdf(i / levels) for i in range(1, levels)])
    for _ in range(50):
        centres, halves = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
        t = halves[:, None] * (nodes + 1) / 2
        under = weights * np.exp(-t * t / 2)
        area = (under * np.cosh(centres[:, None] * t)).sum(axis=1)
        beside = -(under * t * np.sinh(centres[:, None] * t)).sum(axis=1) / area
        outer = sqrt(pi / 2) * erfc(edges[-1] / sqrt(2))
        last = exp(-(edges[-1] ** 2) / 2) / outer - edges[-1]
        below, above = np.append(last, halves - beside), np.append(halves + beside, last)  # from edge to centroid
        # Of m, the mean of [a, b]: ∂m/∂a = φ(a)(m − a)/share and ∂m/∂b = φ(b)(b − m)/share; the factor sqrt(2π) of
        # heights and shares cancels.
        heights, shares = np.exp(-(edges**2) / 2), np.hstack([outer, np.exp(-(centres**2) / 2) * halves * area, outer])
        up, down = heights * below / shares[:-1], heights * above / shares[1:]
        slope = np.diag(1 - (up + down) / 2) - np.diag(down[:-1] / 2, -1) - np.diag(up[1:] / 2, 1)
        step = np.linalg.solve(slope, (above - below) / 2)
        edges = edges + step
        if np.abs(step).max() < 1e-14:
            break
    edges = (edges - edges[::-1]) / 2  # exactly symmetric, whatever rounding did
    centroids = np.append(edges[0] - last, edges + above)
    return (centroids - centroids[::-1]) / 2, edges


def thresholds_of(mean: Values, deviation: Values, quantiles: Array) -> Values:
    """τ_t = μ̄ + σ̄ Υ⁻¹(t / (T + 1)): `[layers]`, `[layers]`, `[T]` → `[layers, T]`, in float64 from float32 values
    (others are rounded to these first), rounded to float32; infinite beyond its range."""
    arguments = ("mean", mean), ("deviation", deviation), ("quantiles", quantiles)
    with np.errstate(over="ignore"):
        mu, sigma, z = (as_array(*given).astype(np.float32).astype(np.float64) for given in arguments)
        if mu.ndim != 1 or mu.shape != sigma.shape or not (sigma >= 0).all():
            got = f"{list(mu.shape)} and {list(sigma.shape)}"
            raise ValueError(
                f"mean, deviation: got {got}, expected one of each for every layer, deviations of at least 0"
            )
        tau = (mu[:, None] + sigma[:, None] * z[None, :]).astype(np.float32)
    return torch.from_numpy(tau).to(mean.device) if isinstance(mean, Tensor) else tau


def symbols_of(sketched: Values, thresholds: Tensor | Array, sizes: Sequence[int]) -> Values:
    """q(i) = #{t : y(i) ≥ τ_t}: `[clients, Σ m]` and `[layers, T]`, which rise, → uint8 `[clients, Σ m]`.

    Both are rounded to float32 before they are compared. On the host NaN and falling thresholds are refused; a GPU is
    not waited for.

    >>> symbols_of(np.float32([-2, 0, 2]), np.float32([[-1, 0, 1]]), sizes=[3])
    array([0, 2, 3], dtype=uint8)
    """
    parts = _split_layers(sketched, sizes)
    tau = as_tensor("thresholds", thresholds, parts[0].device).float().contiguous()
    if tau.ndim != 2 or not 1 <= tau.shape[1] <= _MOST_THRESHOLDS:
        raise ValueError(
            f"thresholds: got shape {list(tau.shape)}, expected [{len(parts)}, T], T from 1 to {_MOST_THRESHOLDS}"
        )
    if tau.device.type == "cpu":
        falls_or_nan = tau.isnan().any() | (tau.diff(dim=1) < 0).any()
        if bool(falls_or_nan) or any(bool(part.isnan().any()) for part in parts):
            raise ValueError("symbols_of: got NaN, or thresholds that fall, expected numbers and rising thresholds")
    bins = [torch.bucketize(part.float().contiguous(), row, right=True) for part, row in zip(parts, tau, strict=True)]
    return like_input(sketched, torch.cat(bins, dim=1).to(torch.uint8))


def narrowest_interval(quantiles: NDArray[np.float32]) -> float:
    """Smallest distance of two neighbouring thresholds in units of σ̄; infinite for one threshold."""
    return float(np.diff(quantiles.astype(np.float64)).min()) if len(quantiles) > 1 else float("inf")
