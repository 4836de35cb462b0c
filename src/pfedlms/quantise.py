"""Statistics → thresholds → symbols, and the vote over them.

Both ends compute thresholds from the same few float32 numbers in the same order and precision, so they agree on every
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.kernels import compiled

_PART = 2048  # coordinates whose counters stay in the cache while clients are added to them
_WORTH_SHARING = 1 << 22  # symbols or counters; waking threads costs more than counting fewer


def statistics(sketched: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each layer's sketch: `[clients, Σ m]` → two `[clients, layers]`, taken in
    float64, returned as float32."""
    parts = [part.double() for part in torch.split(sketched, list(sizes), dim=1)]
    means = torch.stack([part.mean(dim=1) for part in parts], dim=1)
    variances = torch.stack([part.var(dim=1, correction=0) for part in parts], dim=1)
    return means.float(), variances.float()


def pool_statistics(
    samples: Sequence[int], means: NDArray[np.float32], variances: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and standard deviation of all clients' sketches together: `[clients, layers]` → two `[layers]`.

        μ̄ = (Σ N_k m_k) / N          σ̄² = (Σ N_k (s_k + (m_k − μ̄)²)) / N

    Sums run over the clients in the order given (ascending ids), one after another, in float64; results are rounded to
    float32.
    """
    m, s = means.astype(np.float64), variances.astype(np.float64)
    mean, square = np.zeros(m.shape[1]), np.zeros(m.shape[1])
    for weight, own in zip(samples, m, strict=True):
        mean += weight * own
    mean /= sum(samples)
    for weight, own, variance in zip(samples, m, s, strict=True):
        square += weight * (variance + (own - mean) ** 2)
    return mean.astype(np.float32), np.sqrt(square / sum(samples)).astype(np.float32)


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


class Vote:
    """A weighted majority vote at every threshold, one client at a time.

        v_t(i) = sign(Σ_k N_k b_t^k(i)),   sign(0) = +1;     q̃(i) = #{t : v_t(i) = +1}

    which is the bin of the upper weighted median of the clients' values. A ballot adds N_k to one counter per
    coordinate (the weight that chose each symbol); the T sums are suffix sums of those. Memory is T counters a
    coordinate, in the narrowest integers that hold N, whatever the number of clients.
    """

    def __init__(self, size: int, thresholds: int) -> None:
        self.total = 0
        self._counts: NDArray[np.unsignedinteger] = np.zeros((size, thresholds), dtype=np.uint8)

    def add(self, symbols: NDArray[np.uint8], weights: int | Sequence[int]) -> None:
        """Count one client's symbols `[size]` with weight N_k, or several clients' `[clients, size]` with theirs."""
        rows = np.ascontiguousarray(np.atleast_2d(symbols))
        own = [weights] if isinstance(weights, int) else weights
        size, thresholds = self._counts.shape
        if rows.shape != (len(own), size) or (rows.size and rows.max() > thresholds):
            raise ValueError(f"vote: got {symbols.shape} symbols, expected ({size},) of 0 to {thresholds} a client")
        self.total += sum(own)
        needed = np.min_scalar_type(self.total)
        if needed.itemsize > self._counts.dtype.itemsize:
            self._counts = self._counts.astype(needed)
        count = _count_shared if rows.size > _WORTH_SHARING else _count
        count(self._counts, rows, np.array(own, dtype=self._counts.dtype))

    def result(self) -> NDArray[np.uint8]:
        """Consensus symbols `[size]`."""
        result = np.zeros(len(self._counts), dtype=np.uint8)
        decide = _majority_shared if self._counts.size > _WORTH_SHARING else _majority
        decide(self._counts, np.uint64(self.total), result)
        return result

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes


@compiled()
def _count_part(counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any], start: int) -> None:
    own = counts[start : start + _PART]
    for client in range(len(symbols)):
        chosen, weight = symbols[client, start : start + _PART], weights[client]
        for i in range(len(chosen)):
            if chosen[i] > 0:
                own[i, chosen[i] - 1] += weight


@compiled()
def _majority_part(counts: NDArray[Any], total: Any, result: NDArray[Any], start: int) -> None:
    for i in range(start, min(start + _PART, len(counts))):
        above, chosen = np.uint64(0), 0
        for t in range(counts.shape[1] - 1, -1, -1):
            above += np.uint64(counts[i, t])
            # Σ N_k b_t ≥ 0 means that those at or above the threshold weigh at least as much as those below; no
            # doubling, so no overflow.
            chosen += above >= total - above
        result[i] = chosen


@compiled()
def _count(counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any]) -> None:
    for start in range(0, len(counts), _PART):
        _count_part(counts, symbols, weights, start)


@compiled(parallel=True)
def _count_shared(counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any]) -> None:
    for part in prange((len(counts) + _PART - 1) // _PART):
        _count_part(counts, symbols, weights, part * _PART)


@compiled()
def _majority(counts: NDArray[Any], total: Any, result: NDArray[Any]) -> None:
    for start in range(0, len(counts), _PART):
        _majority_part(counts, total, result, start)


@compiled(parallel=True)
def _majority_shared(counts: NDArray[Any], total: Any, result: NDArray[Any]) -> None:
    for part in prange((len(counts) + _PART - 1) // _PART):
        _majority_part(counts, total, result, part * _PART)


def narrowest_interval(quantiles: NDArray[np.float32]) -> float:
    """Smallest distance of two neighbouring thresholds in units of σ̄; infinite for one threshold."""
    return float(np.diff(quantiles.astype(np.float64)).min()) if len(quantiles) > 1 else float("inf")
