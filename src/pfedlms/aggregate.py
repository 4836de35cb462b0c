"""What a server makes of its clients' messages: sums, votes and pooled statistics.

Each is a fold over the clients in the order of their ids, so it does not matter how they were grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import compiled, share

_PART = 2048  # coordinates whose counters stay in the cache while clients are added to them
_SUM_PART = 4096  # entries of a sum that stay in the cache while clients are added to them


class WeightedMean:
    """Σ N_k x_k / Σ N_k for vectors of `size` entries, in float64, one client after another."""

    def __init__(self, size: int) -> None:
        self._sum, self._weight = torch.zeros(size, dtype=torch.float64), 0

    def add(self, samples: Sequence[int], values: Tensor) -> WeightedMean:
        """Add some clients' vectors `[clients, size]`."""
        added, weights = values.contiguous().numpy(), np.array(samples, dtype=np.float64)
        share(_add_weighted, -(-added.shape[1] // _SUM_PART), len(added) * _SUM_PART, self._sum.numpy(), added, weights)
        self._weight += sum(samples)
        return self

    def result(self) -> Tensor:
        """In float64."""
        return self._sum / self._weight


@compiled()
def _add_weighted(first: int, last: int, total: NDArray[Any], values: NDArray[Any], weights: NDArray[Any]) -> None:
    for start in range(first * _SUM_PART, min(last * _SUM_PART, len(total)), _SUM_PART):
        for client in range(len(values)):
            sums, own = total[start : start + _SUM_PART], values[client, start : start + _SUM_PART]
            for i in range(len(own)):
                sums[i] += np.float64(own[i]) * weights[client]


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


def weighted_median(samples: Sequence[int], values: NDArray[np.float32]) -> np.float32:
    """The smallest x_j > 0 with 2 Σ_{0 < x_k ≤ x_j} N_k ≥ Σ_{0 < x_k} N_k, of `values: [clients]`, none below zero; 0
    where all are zero."""
    order = np.argsort(values, kind="stable")
    order = order[values[order] > 0]
    if not len(order):
        return np.float32(0)
    below = np.cumsum(np.array(samples, dtype=np.int64)[order])
    # Compared without doubling, so that nothing overflows.
    return np.float32(values[order[np.argmax(below >= below[-1] - below)]])


class Vote:
    """A weighted majority vote at every threshold, one client at a time.

        v_t(i) = sign(Σ_k N_k b_t^k(i)),   sign(0) = +1;     q̃(i) = #{t : v_t(i) = +1}

    which is the bin of the upper weighted median of the clients' values. A ballot adds N_k to one counter per
    coordinate (the weight that chose each symbol); the T sums are suffix sums of those. Memory is T counters a
    coordinate, in the narrowest integers that hold N, whatever the number of clients.
    """

    def __init__(self, size: int, thresholds: int) -> None:
        self.total = 0
        self.counts: NDArray[np.unsignedinteger] = np.zeros((size, thresholds), dtype=np.uint8)

    def add(self, symbols: NDArray[np.uint8], weights: int | Sequence[int]) -> None:
        """Count one client's symbols `[size]` with weight N_k, or several clients' `[clients, size]` with theirs."""
        rows = np.ascontiguousarray(np.atleast_2d(symbols))
        own = [weights] if isinstance(weights, int) else weights
        size, thresholds = self.counts.shape
        if rows.shape != (len(own), size) or (rows.size and rows.max() > thresholds):
            raise ValueError(f"vote: got {symbols.shape} symbols, expected ({size},) of 0 to {thresholds} a client")
        self.total += sum(own)
        needed = np.min_scalar_type(self.total)
        if needed.itemsize > self.counts.dtype.itemsize:
            self.counts = self.counts.astype(needed)
        weight = np.array(own, dtype=self.counts.dtype)
        kernel = _count_raised if thresholds == 1 else _count
        share(kernel, -(-size // _PART), len(rows) * _PART, self.counts, rows, weight)

    def result(self) -> NDArray[np.uint8]:
        """Consensus symbols `[size]`."""
        result = np.zeros(len(self.counts), dtype=np.uint8)
        size, thresholds = self.counts.shape
        share(_majority, -(-size // _PART), thresholds * _PART, self.counts, np.uint64(self.total), result)
        return result


@compiled()
def _count(first: int, last: int, counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any]) -> None:
    for start in range(first * _PART, min(last * _PART, len(counts)), _PART):
        own = counts[start : start + _PART]
        for client in range(len(symbols)):
            chosen, weight = symbols[client, start : start + _PART], weights[client]
            for i in range(len(chosen)):
                if chosen[i] > 0:
                    own[i, chosen[i] - 1] += weight


@compiled()
def _count_raised(first: int, last: int, counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any]) -> None:
    """`_count` for symbols 0 and 1, without a branch that goes either way as often."""
    flat = counts.reshape(-1)
    for start in range(first * _PART, min(last * _PART, len(flat)), _PART):
        own = flat[start : start + _PART]
        for client in range(len(symbols)):
            chosen, weight = symbols[client, start : start + _PART], weights[client]
            for i in range(len(chosen)):
                own[i] += weight * own.dtype.type(chosen[i])


@compiled()
def _majority(first: int, last: int, counts: NDArray[Any], total: Any, result: NDArray[Any]) -> None:
    for i in range(first * _PART, min(last * _PART, len(counts))):
        above, chosen = np.uint64(0), 0
        for t in range(counts.shape[1] - 1, -1, -1):
            above += np.uint64(counts[i, t])
            # Σ N_k b_t ≥ 0 means that those at or above the threshold weigh at least as much as those below; no
            # doubling, so no overflow.
            chosen += above >= total - above
        result[i] = chosen
